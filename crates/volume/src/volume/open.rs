//! Opening: which devices belong together, and which are missing.

use std::collections::BTreeMap;

use ubtrfs_ondisk::misc::DevItem;
use ubtrfs_ondisk::superblock::{SUPERBLOCK_OFFSETS, Superblock};
use ubtrfs_ondisk::verify::{self, Geometry};
use ubtrfs_ondisk::{Corruption, CsumType, DeviceId, Generation, Reason, Uuid};
use ubtrfs_rt::{Arc, AtomicBool, Mutex, RwLock};

use super::watch::Watch;
use super::{LeftOut, Member, Volume, VolumeOptions};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::missing;
use crate::superblocks::{self, Seen};

impl Volume {
    /// Opens the filesystem that the devices make up: reads their superblocks and takes in the
    /// system chunks. The other chunks are the caller's to add.
    ///
    /// # Errors
    /// `NotBtrfs` or `BadSuperblock` for a device without a usable superblock; `OtherFilesystem`,
    /// `DuplicateDevice`, `StaleDevice`, `OtherHistory` or `MissingDevice` when the devices do not make up one
    /// filesystem; `Unsupported` for a feature that cannot be opened; `TooShort`; `Io`; `Corrupt`.
    pub fn open(devices: Vec<Arc<dyn Device>>, options: &VolumeOptions) -> Result<Self> {
        let copy = options.super_copy.unwrap_or(0);
        let mut found = Vec::with_capacity(devices.len());
        for device in devices {
            let superblock = superblocks::read(&*device, copy)?;
            found.push((device, superblock));
        }
        let newest = newest_of(&found)?;
        superblocks::check_features(&newest, options.read_only)?;
        let mut volume = Self {
            options: *options,
            geometry: geometry_of(&newest)?,
            members: RwLock::default(),
            map: RwLock::default(),
            superblock: RwLock::new(newest.clone()),
            is_caught_up: AtomicBool::new(false),
            catching_up: Mutex::default(),
            watch: Watch::new(found.iter().any(|(device, _)| device.is_shareable())),
            left_out: Vec::new(),
        };
        for (device, superblock) in found {
            verify::superblock(&superblock)?;
            volume.take_member(device, &superblock, &newest)?;
        }
        let volume = volume.with_all_members(&newest)?;
        for chunk in newest.sys_chunks()? {
            volume.add_chunk(chunk)?;
        }
        Ok(volume)
    }

    /// The volume of a filesystem that is being made; nothing is read. Device `i` gets the number
    /// `i + 1` and the superblock's `dev_item` with its own length; the caller gives each its uuid
    /// with [`Volume::set_device_item`] before it adds chunks.
    ///
    /// # Errors
    /// `Corrupt` when the superblock's sizes or checksum are impossible; `ReadOnly`.
    pub fn create(devices: Vec<Arc<dyn Device>>, superblock: Superblock) -> Result<Self> {
        let geometry = geometry_of(&superblock)?;
        let watch = Watch::new(devices.iter().any(|device| device.is_shareable()));
        let mut members = BTreeMap::new();
        for (devid, device) in (1..).zip(devices) {
            if device.is_read_only() {
                return Err(Error::ReadOnly { device: device.name() });
            }
            let mut item = DevItem {
                devid: devid.into(),
                total_bytes: device.len_bytes().into(),
                ..superblock.dev_item
            };
            if devid != 1 {
                item.uuid = Uuid::NIL.0;
            }
            members.insert(DeviceId(devid), Member::new(item, Some(device), None));
        }
        Ok(Self {
            options: VolumeOptions::default(),
            geometry,
            members: RwLock::new(members),
            map: RwLock::default(),
            superblock: RwLock::new(Box::new(superblock)),
            is_caught_up: AtomicBool::new(true),
            catching_up: Mutex::default(),
            watch,
            left_out: Vec::new(),
        })
    }

    fn take_member(
        &mut self,
        device: Arc<dyn Device>,
        superblock: &Superblock,
        newest: &Superblock,
    ) -> Result<()> {
        let generation = superblock.generation.get();
        if generation == newest.generation.get() && !superblocks::is_same_commit(superblock, newest)
        {
            return Err(Error::OtherHistory {
                device: device.name(),
                generation: Generation(generation),
            });
        }
        if generation < newest.generation.get() && !is_cut_off(&*device, superblock, newest) {
            let device = device.name();
            let have = Generation(generation);
            let newest = Generation(newest.generation.get());
            if self.options.degraded {
                self.left_out.push(LeftOut { device, have, newest });
                return Ok(());
            }
            return Err(Error::StaleDevice { device, have, newest });
        }
        if !self.options.read_only {
            if device.is_read_only() {
                return Err(Error::ReadOnly { device: device.name() });
            }
            let expect_bytes = superblock.dev_item.total_bytes.get();
            if device.len_bytes() < expect_bytes {
                let have_bytes = device.len_bytes();
                return Err(Error::TooShort { device: device.name(), have_bytes, expect_bytes });
            }
        }
        // Opened from a copy, the primary's state is whatever it is: that must not change either.
        let seen = match self.options.super_copy {
            None | Some(0) => Some(Seen::of(superblock)),
            Some(_) => superblocks::read_copy(&*device, SUPERBLOCK_OFFSETS[0])
                .ok()
                .map(|primary| Seen::of(&primary)),
        };
        let devid = DeviceId(superblock.dev_item.devid.get());
        let mut members = self.members.write();
        if let Some(Member { device: Some(first), .. }) = members.get(&devid).map(|m| &**m) {
            let (first, second) = (first.name(), device.name());
            return Err(Error::DuplicateDevice { first, second, devid });
        }
        members.insert(devid, Member::new(superblock.dev_item, Some(device), seen));
        Ok(())
    }

    /// Finds out which devices are missing, if any are, and takes them in as such.
    fn with_all_members(mut self, newest: &Superblock) -> Result<Self> {
        let expect = newest.num_devices.get();
        let have = self.members.read().len() as u64;
        if have > expect {
            return Err(Corruption::new(Reason::BadValue)
                .have(format!("{have} devices"))
                .expect(format!("{expect}, as the superblock says"))
                .into());
        }
        if have == expect {
            return Ok(self);
        }
        let options = self.options;
        // Reads what there is, so as to know what there is not.
        self.options = VolumeOptions { read_only: true, degraded: true, ..options };
        let mut unreadable = None;
        for chunk in newest.sys_chunks()? {
            self.add_chunk(chunk)?;
        }
        match missing::device_items(&self) {
            Ok(items) => {
                for item in items {
                    let devid = DeviceId(item.devid.get());
                    if self.device(devid).is_none() {
                        self.set_device_item(item);
                    }
                }
            }
            Err(error) => unreadable = Some(error),
        }
        self.options = options;
        if options.degraded {
            return Ok(self);
        }
        let members = self.members.read();
        let absent = members.values().find(|member| member.device.is_none());
        Err(match (absent, unreadable) {
            (Some(member), _) => self.missing_error(member),
            (None, Some(error @ Error::Io { .. })) => error,
            (None, _) => {
                Error::MissingDevice { fsid: Uuid(newest.fsid), devid: None, device_uuid: None }
            }
        })
    }
}

/// Whether a device is behind because a power cut came between the superblocks of the devices: what
/// the newer one reaches was durable on all. The copies are durable on all devices before the first
/// primary is written, so this device has the new one then. One that was missing in the last commit
/// has not, and lacks what that commit wrote; it may have one of that generation, of a commit that was cut off, and made again without it.
/// A device too short for a copy cannot be told from that.
fn is_cut_off(device: &dyn Device, superblock: &Superblock, newest: &Superblock) -> bool {
    if superblocks::copies(superblock.dev_item.total_bytes.get()).nth(1).is_none() {
        return superblock.generation.get().saturating_add(1) == newest.generation.get();
    }
    superblocks::read_copy(device, SUPERBLOCK_OFFSETS[1]).is_ok_and(|copy| {
        copy.dev_item.devid == superblock.dev_item.devid
            && superblocks::is_same_commit(&copy, newest)
    })
}

type Found = (Arc<dyn Device>, Box<Superblock>);

/// The superblock of the highest generation, once all are of one filesystem; of those one with a log, which Linux may have written to some
/// devices only, as a cut or a device that failed kept it from the others.
fn newest_of(found: &[Found]) -> Result<Box<Superblock>> {
    let Some((_, first)) = found.first() else {
        let device = "(no device)".to_owned();
        return Err(Error::NotBtrfs { device, at: SUPERBLOCK_OFFSETS[0], found: None });
    };
    for (device, superblock) in found {
        if superblock.fsid != first.fsid {
            return Err(Error::OtherFilesystem {
                device: device.name(),
                have: Uuid(superblock.fsid),
                expect: Uuid(first.fsid),
            });
        }
    }
    let newest = found.iter().rev().max_by_key(|(_, superblock)| {
        (superblock.generation.get(), superblock.log_root.get() != 0)
    });
    Ok(newest.map_or_else(|| first.clone(), |(_, superblock)| superblock.clone()))
}

fn geometry_of(superblock: &Superblock) -> Result<Geometry> {
    let (nodesize, sectorsize) = (superblock.nodesize.get(), superblock.sectorsize.get());
    let possible = |bytes: u32| bytes.is_power_of_two() && (4096..=65536).contains(&bytes);
    if !possible(nodesize) || !possible(sectorsize) || nodesize < sectorsize {
        return Err(Corruption::new(Reason::BadGeometry)
            .have(format!("nodes of {nodesize} bytes, sectors of {sectorsize}"))
            .expect("powers of two from 4096 to 65536, nodes not below sectors")
            .into());
    }
    Ok(Geometry {
        nodesize_bytes: nodesize as usize,
        sectorsize_bytes: sectorsize as usize,
        csum: CsumType::from_disk(superblock.csum_type.get())?,
        fsid: superblock.header_fsid(),
    })
}
