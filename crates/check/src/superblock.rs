//! The superblock, its copies on all devices and its backups of the roots.

use ubtrfs_ondisk::features::Incompat;
use ubtrfs_ondisk::misc::DevItem;
use ubtrfs_ondisk::superblock::{RootBackup, SUPERBLOCK_BYTES, SUPERBLOCK_OFFSETS, Superblock};
use ubtrfs_ondisk::{DeviceId, Generation, PhysicalAddr, Reason, RootId, Uuid, verify};
use ubtrfs_volume::Device;

use crate::context::Context;
use crate::finding::Finding;
use crate::roots::Roots;
use crate::view::number;

impl Context<'_> {
    pub(crate) fn check_superblock(&mut self) {
        self.check_fields();
        self.check_backups();
        for item in self.volume.device_items() {
            let device = DeviceId(item.devid.get());
            if let Some(medium) = self.volume.device(device) {
                self.check_copies(device, &*medium, item.total_bytes.get());
            }
        }
    }

    fn check_fields(&mut self) {
        let superblock = self.superblock;
        let mut wrong = |field, have: String, expect: String| {
            self.findings.push(Finding::SuperblockField { field, have, expect });
        };
        // Most of it a volume refuses at its opening; one that is being written was never opened.
        if let Err(corruption) = verify::superblock(&superblock) {
            let have = format!("{}: {}", corruption.reason, corruption.have);
            wrong("one field", have, corruption.expect);
        }
        let generation = self.generation;
        let chunk_root = superblock.chunk_root_generation.get();
        if chunk_root > generation {
            let expect = format!("at most {generation}");
            wrong("chunk_root_generation", chunk_root.to_string(), expect);
        }
        let cache = superblock.cache_generation.get();
        if cache > generation && cache != u64::MAX {
            wrong("cache_generation", cache.to_string(), format!("at most {generation}"));
        }
        let uuids = superblock.uuid_tree_generation.get();
        if uuids > generation {
            wrong("uuid_tree_generation", uuids.to_string(), format!("at most {generation}"));
        }
        if !Incompat(superblock.incompat_flags.get()).contains(Incompat::MIXED_BACKREF) {
            let used_by = "every filesystem since 2009".to_owned();
            self.findings.push(Finding::FeatureMissing { feature: "MIXED_BACKREF", used_by });
        }
        if cache != 0 && cache < generation {
            let (have, expect) = (Generation(cache), Generation(generation));
            self.findings.push(Finding::SpaceCacheStale { have, expect });
        }
    }

    /// The backup of this commit, and its number.
    fn own_backup(&self) -> Option<(u64, RootBackup)> {
        let backups = self.superblock.super_roots.iter().copied().enumerate();
        let mut own = backups.filter(|(_, backup)| {
            backup.tree_root_gen.get() == self.generation && backup.tree_root.get() != 0
        });
        own.next().map(|(index, backup)| (number(index), backup))
    }

    fn compare_backup(&mut self, index: u64, fields: &[(&'static str, u64, u64)]) {
        for (field, have, expect) in fields {
            if have != expect {
                let (have, expect) = (*have, *expect);
                self.findings.push(Finding::BackupRoot { index, field, have, expect });
            }
        }
    }

    /// What the backup of this commit says of trees that have root items. Linux fills it in when
    /// the next transaction may have begun: what is of that one is not compared.
    pub(crate) fn check_backup_trees(&mut self, roots: &Roots) {
        let Some((index, own)) = self.own_backup() else { return };
        let trees = [
            ("extent_root", own.extent_root, own.extent_root_gen, RootId::EXTENT_TREE),
            ("fs_root", own.fs_root, own.fs_root_gen, RootId::FS_TREE),
            ("dev_root", own.dev_root, own.dev_root_gen, RootId::DEV_TREE),
            ("csum_root", own.csum_root, own.csum_root_gen, RootId::CSUM_TREE),
        ];
        for (field, have, generation, tree) in trees {
            let is_judged = have.get() != 0 && generation.get() <= self.generation;
            if let Some(root) = roots.by_id.get(&tree).filter(|_| is_judged) {
                self.compare_backup(index, &[(field, have.get(), root.item.bytenr.get())]);
            }
        }
    }

    /// One of the backups is of this commit and says what the superblock says.
    fn check_backups(&mut self) {
        let superblock = self.superblock;
        let Some((index, own)) = self.own_backup() else {
            // mkfs.btrfs of long ago wrote none.
            if superblock.super_roots.iter().any(|backup| backup.tree_root.get() != 0) {
                let expect = Generation(self.generation);
                self.findings.push(Finding::BackupRootMissing { expect });
            }
            return;
        };
        let fields = [
            ("tree_root", own.tree_root.get(), superblock.root.get()),
            ("tree_root_level", own.tree_root_level.into(), superblock.root_level.into()),
            ("chunk_root", own.chunk_root.get(), superblock.chunk_root.get()),
            ("chunk_root_level", own.chunk_root_level.into(), superblock.chunk_root_level.into()),
            ("chunk_root_gen", own.chunk_root_gen.get(), superblock.chunk_root_generation.get()),
            ("total_bytes", own.total_bytes.get(), superblock.total_bytes.get()),
            ("bytes_used", own.bytes_used.get(), superblock.bytes_used.get()),
            ("num_devices", own.num_devices.get(), superblock.num_devices.get()),
        ];
        self.compare_backup(index, &fields);
    }

    fn check_copies(&mut self, device: DeviceId, medium: &dyn Device, total_bytes: u64) {
        let there = medium.len_bytes().min(total_bytes);
        let is_late = generation_on(medium).is_some_and(|on| on < self.generation);
        for (copy, at) in (0_u64..).zip(SUPERBLOCK_OFFSETS) {
            if at.0 + number(SUPERBLOCK_BYTES) >= there {
                break;
            }
            match read(medium, at) {
                Ok(found) => self.check_copy(device, copy, &found, is_late),
                Err((Reason::BadMagic, ..)) if copy > 0 => {
                    self.findings.push(Finding::SuperblockCopyAbsent { device, copy });
                }
                Err((reason, have, expect)) => {
                    self.findings.push(Finding::SuperblockCopy {
                        device,
                        copy,
                        reason,
                        have,
                        expect,
                    });
                }
            }
        }
    }

    /// Of a device that `is_late`, whose primary a power cut kept from it, the copies are newer: what
    /// they say of the device is not what the primary says.
    fn check_copy(&mut self, device: DeviceId, copy: u64, found: &Superblock, is_late: bool) {
        let own = &self.superblock;
        let mut differences = Vec::new();
        let mut differ = |field, have: String, expect: String| {
            if have != expect {
                differences.push(Finding::SuperblockCopyDiffers {
                    device,
                    copy,
                    field,
                    have,
                    expect,
                });
            }
        };
        let uuid = |bytes: [u8; 16]| Uuid(bytes).to_string();
        differ("fsid", uuid(found.fsid), uuid(own.fsid));
        differ("the device's fsid", uuid(found.dev_item.fsid), own.header_fsid().to_string());
        differ("the device", found.dev_item.devid.to_string(), device.to_string());
        let have = Generation(found.generation.get());
        let expect = Generation(self.generation);
        if have == expect {
            let numbers = [
                ("root", found.root, own.root),
                ("chunk_root", found.chunk_root, own.chunk_root),
                ("chunk_root_generation", found.chunk_root_generation, own.chunk_root_generation),
                ("total_bytes", found.total_bytes, own.total_bytes),
                ("bytes_used", found.bytes_used, own.bytes_used),
                ("num_devices", found.num_devices, own.num_devices),
                ("flags", found.flags, own.flags),
                ("compat_flags", found.compat_flags, own.compat_flags),
                ("incompat_flags", found.incompat_flags, own.incompat_flags),
                ("compat_ro_flags", found.compat_ro_flags, own.compat_ro_flags),
                ("cache_generation", found.cache_generation, own.cache_generation),
                ("uuid_tree_generation", found.uuid_tree_generation, own.uuid_tree_generation),
            ];
            for (field, have, expect) in numbers {
                differ(field, have.to_string(), expect.to_string());
            }
            let sizes = [
                ("nodesize", found.nodesize, own.nodesize),
                ("sectorsize", found.sectorsize, own.sectorsize),
                ("leafsize", found.leafsize, own.leafsize),
                ("stripesize", found.stripesize, own.stripesize),
            ];
            for (field, have, expect) in sizes {
                differ(field, have.to_string(), expect.to_string());
            }
            let levels = [
                ("root_level", found.root_level, own.root_level),
                ("chunk_root_level", found.chunk_root_level, own.chunk_root_level),
            ];
            for (field, have, expect) in levels {
                differ(field, have.to_string(), expect.to_string());
            }
            let items = self.volume.device_items();
            let item = items.iter().find(|item| item.devid.get() == device.0);
            // Whose it is was compared.
            let DevItem { devid, fsid, .. } = found.dev_item;
            let item = item.map(|item| DevItem { devid, fsid, ..*item });
            // Linux writes the log's root in the primary alone.
            let is_same = [
                ("sys_chunk_array", found.sys_chunk_array == own.sys_chunk_array),
                ("super_roots", found.super_roots == own.super_roots),
                ("label", found.label == own.label),
                ("metadata_uuid", found.metadata_uuid == own.metadata_uuid),
                ("dev_item", is_late || item.is_none_or(|item| found.dev_item == item)),
            ];
            for (field, _) in is_same.into_iter().filter(|(_, is_same)| !is_same) {
                differ(field, "another".to_owned(), "that of the superblock".to_owned());
            }
        } else {
            self.findings.push(Finding::SuperblockCopyStale { device, copy, have, expect });
        }
        self.findings.extend(differences);
    }
}

/// The generation of a device's own superblock.
pub(crate) fn generation_on(medium: &dyn Device) -> Option<u64> {
    let found = read(medium, SUPERBLOCK_OFFSETS[0]).ok()?;
    Some(found.generation.get())
}

fn read(
    medium: &dyn Device,
    at: PhysicalAddr,
) -> Result<Box<Superblock>, (Reason, String, String)> {
    let mut bytes = [0; SUPERBLOCK_BYTES];
    medium.read_at(at, &mut bytes).map_err(|error| {
        (Reason::Truncated, error.to_string(), "a superblock that can be read".to_owned())
    })?;
    Superblock::parse(&bytes, at)
        .map_err(|corruption| (corruption.reason, corruption.have, corruption.expect))
}
