//! Extended attributes, access control lists among them.

use ubtrfs_testkit::model::{Id, Model, Node, ROOT_DIRECTORY};
use ubtrfs_testkit::odd;

use super::Generator;
use crate::op::Op;

pub(super) const ACL_ACCESS: &[u8] = b"system.posix_acl_access";
const ACL_DEFAULT: &[u8] = b"system.posix_acl_default";
const COMPRESSION: &[u8] = b"btrfs.compression";

/// Users that a list names at most: some fill a leaf.
const ACL_USERS_MAX: usize = 300;

// Tags of `linux/posix_acl.h`.
const USER_OBJ: u16 = 0x01;
const USER: u16 = 0x02;
const GROUP_OBJ: u16 = 0x04;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;
const NO_ID: u32 = u32::MAX;

impl Generator {
    pub(super) fn xattr(&mut self, model: &Model) -> Op {
        let id = self.any(model, |_| true);
        // The kernel shows user attributes, lists and properties of files and directories alone.
        let is_plain = |node: &Node| node.entries().is_some() || node.bytes().is_some();
        let is_plain = model.node(id).is_some_and(is_plain);
        let mut name = match self.prng.below(20) {
            0..=3 if is_plain => return self.acl(model, id),
            // A new subvolume takes it over from another's root.
            4 if is_plain && id.inode != ROOT_DIRECTORY => return self.compression(id),
            5..=7 => [b"trusted.", &self.colliding_name()[..]].concat(),
            8..=12 if is_plain => format!("user.{}", self.prng.below(5)).into_bytes(),
            13 => format!("security.{}", self.prng.below(5)).into_bytes(),
            _ => format!("trusted.{}", self.prng.below(5)).into_bytes(),
        };
        if self.prng.chance(1, 6) {
            return Op::RemoveXattr { id, name };
        }
        let limits = *model.limits();
        let mut len = match self.prng.below(12) {
            0 => 0,
            1..=2 => self.prng.index(3000),
            // Two of one hash may not fit a leaf.
            3 => self.prng.index(limits.xattr_bytes - name.len()),
            _ => self.prng.index(60),
        };
        match self.prng.below(60) {
            0 => name.clear(),
            1 => name.resize(256, b'n'),
            2 => name.push(0),
            3 => len = limits.xattr_bytes - name.len(),
            4 => len = limits.xattr_bytes - name.len() + 1,
            _ => {}
        }
        Op::SetXattr { id, name, value: vec![self.letter(); len] }
    }

    fn colliding_name(&mut self) -> Vec<u8> {
        self.colliding[self.prng.index(self.colliding.len())].clone()
    }

    fn acl(&mut self, model: &Model, id: Id) -> Op {
        let is_directory = model.node(id).is_some_and(|node| node.entries().is_some());
        let name = if is_directory && self.prng.chance(1, 2) { ACL_DEFAULT } else { ACL_ACCESS };
        let name = name.to_vec();
        if self.prng.chance(1, 5) {
            return Op::RemoveXattr { id, name };
        }
        let count = match self.prng.below(6) {
            0 => self.prng.index(ACL_USERS_MAX),
            _ => self.prng.index(5),
        };
        // A list that says of its inode's permissions what they are; it names somebody.
        let mode = model.node(id).map_or(0, |node| node.mode);
        let class = |shift: u32| u16::try_from(mode >> shift & 7).expect("three bits");
        let mut entries = vec![(USER_OBJ, class(6), NO_ID)];
        let mut permissions = || u16::try_from(self.prng.below(8)).expect("three bits");
        entries.extend((1000..).take(1 + count).map(|user| (USER, permissions(), user)));
        entries.push((GROUP_OBJ, permissions(), NO_ID));
        entries.push((MASK, class(3), NO_ID));
        entries.push((OTHER, class(0), NO_ID));
        Op::SetXattr { id, name, value: odd::acl_xattr(&entries) }
    }

    fn compression(&mut self, id: Id) -> Op {
        let name = COMPRESSION.to_vec();
        if self.prng.chance(1, 5) {
            return Op::RemoveXattr { id, name };
        }
        let value = [&b"zlib"[..], b"lzo", b"zstd"][self.prng.index(3)].to_vec();
        Op::SetXattr { id, name, value }
    }
}
