//! What a check can find: a variant for each kind of damage, each with its place.

mod value;

use std::fmt;

use ubtrfs_ondisk::{
    DeviceId, Generation, InodeNo, Key, LogicalAddr, PhysicalAddr, Reason, RootId, Uuid,
};

pub use value::{Maybe, Name, Reference, Severity, Value};

use value::ToValue;

macro_rules! findings {
    ($(
        $(#[$doc:meta])*
        $name:ident $severity:ident $kind:literal $text:literal {
            $($field:ident: $ty:ty,)*
        }
    )*) => {
        /// One thing that a check found. Fields of one name mean the same everywhere:
        ///
        /// - `root`, `block`, `slot`, `key`: the tree in which it was met, the tree block, the item
        ///   in it, its key; `parent` is the block that points to it, or the parent tree;
        /// - `bytenr`, `at`, `chunk`, `group`: logical addresses of an extent, of anything, of a
        ///   chunk, of a block group; `len_bytes` is the length there;
        /// - `device`, `offset` or `physical`: a place on a device; `copy` counts superblocks,
        ///   `mirror` the copies of a range, both from 0;
        /// - `inode`, `offset`: an inode and an offset in the file; `directory`, `name`, `index`: an
        ///   entry of a directory;
        /// - `have` is what is there, `expect` or `limit` what should be, `field` or `what` of what.
        #[derive(Clone, PartialEq, Eq, Debug)]
        #[non_exhaustive]
        pub enum Finding {
            $($(#[$doc])* $name {
                $(#[doc = concat!("See at [`Finding`]: `", stringify!($field), "`.")] $field: $ty,)*
            },)*
        }

        impl Finding {
            /// The names of all kinds.
            pub const KINDS: &'static [&'static str] = &[$($kind,)*];

            /// The kind's name, which does not change between versions.
            pub fn kind(&self) -> &'static str {
                match self {
                    $(Self::$name { .. } => $kind,)*
                }
            }

            /// How bad it is.
            pub fn severity(&self) -> Severity {
                match self {
                    $(Self::$name { .. } => Severity::$severity,)*
                }
            }

            /// The place and the facts, each by its name.
            pub fn fields(&self) -> Vec<(&'static str, Value)> {
                match self {
                    $(Self::$name { $($field),* } => {
                        vec![$((stringify!($field), $field.to_value()),)*]
                    })*
                }
            }
        }

        impl fmt::Display for Finding {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $(Self::$name { $($field),* } => {
                        $(let _ = $field;)*
                        write!(f, $text)
                    })*
                }
            }
        }
    };
}

findings! {
    // The superblock.

    /// A copy of the superblock is not one: magic, checksum, own address, impossible fields.
    SuperblockCopy Error "superblock-copy"
        "superblock copy {copy} of device {device}: {reason}, have {have}, expect {expect}" {
        device: DeviceId, copy: u64, reason: Reason, have: String, expect: String,
    }
    /// A copy of the superblock was never written, as tools that restore images leave it.
    SuperblockCopyAbsent Note "superblock-copy-absent"
        "superblock copy {copy} of device {device}: there is none" {
        device: DeviceId, copy: u64,
    }
    /// A copy of another commit, as a cut between two writes leaves it.
    SuperblockCopyStale Note "superblock-copy-stale"
        "superblock copy {copy} of device {device} is of generation {have}, not {expect}" {
        device: DeviceId, copy: u64, have: Generation, expect: Generation,
    }
    /// A copy of the same commit that says something else.
    SuperblockCopyDiffers Error "superblock-copy-differs"
        "superblock copy {copy} of device {device}: {field} is {have}, expect {expect}" {
        device: DeviceId, copy: u64, field: &'static str, have: String, expect: String,
    }
    /// A field of the superblock is wrong.
    SuperblockField Error "superblock-field"
        "superblock: {field} is {have}, expect {expect}" {
        field: &'static str, have: String, expect: String,
    }
    /// The backup of the roots that should be this commit's is not. Linux fills it in when the next
    /// transaction may have begun, so that a cut can leave such a one.
    BackupRoot Note "backup-root"
        "superblock: backup root {index}: {field} is {have}, expect {expect}" {
        index: u64, field: &'static str, have: u64, expect: u64,
    }
    /// No backup of the roots is this commit's; see there.
    BackupRootMissing Note "backup-root-missing"
        "superblock: no backup root is of generation {expect}" {
        expect: Generation,
    }
    /// The superblock's array of system chunks and the chunk tree disagree.
    SysChunkArray Error "sys-chunk-array"
        "superblock: system chunk at {chunk}: the array has {have}, the chunk tree {expect}" {
        chunk: LogicalAddr, have: String, expect: String,
    }
    /// Something is used whose feature bit is not set.
    FeatureMissing Error "feature-missing"
        "superblock: {feature} is not set, but {used_by} uses it" {
        feature: &'static str, used_by: String,
    }
    /// The same where Linux leaves it so: data that was compressed when it came sets no bit.
    FeatureUnset Note "feature-unset"
        "superblock: {feature} is not set, but {used_by} uses it" {
        feature: &'static str, used_by: String,
    }
    /// The superblock's count of used bytes is not the sum of the extents.
    SuperblockBytesUsed Error "superblock-bytes-used"
        "superblock: bytes_used is {have}, the extents take {expect}" {
        have: u64, expect: u64,
    }
    /// The superblock counts more bytes than its devices have, which Linux takes as it is.
    SuperblockTotalBytes Note "superblock-total-bytes"
        "superblock: total_bytes is {have}, the devices have {expect}" {
        have: u64, expect: u64,
    }
    /// The free space cache is of another generation; Linux drops it.
    SpaceCacheStale Note "space-cache-stale"
        "the free space cache (v1) is of generation {have}, not {expect}; Linux drops it" {
        have: Generation, expect: Generation,
    }

    // Tree blocks.

    /// A block that the structural verifier refuses, in all copies.
    BadBlock Error "bad-block"
        "root {root}, block {block}, slot {slot}: {reason}, have {have}, expect {expect}" {
        root: RootId, block: LogicalAddr, slot: Maybe<u64>, reason: Reason, have: String,
        expect: String,
    }
    /// One copy of a block is bad, another is whole.
    BadBlockCopy Error "bad-block-copy"
        "root {root}, block {block}: copy {mirror} is bad: {reason}, have {have}, expect {expect}" {
        root: RootId, block: LogicalAddr, mirror: u64, reason: Reason, have: String, expect: String,
    }
    /// A block that cannot be read.
    UnreadableBlock Error "unreadable-block"
        "root {root}, block {block}: {error}" {
        root: RootId, block: LogicalAddr, error: String,
    }
    /// A leaf without items that is not a root.
    EmptyLeaf Error "empty-leaf"
        "root {root}, block {block}: a leaf below {parent} is empty" {
        root: RootId, block: LogicalAddr, parent: LogicalAddr,
    }
    /// A block's last key is not below the first key of its right neighbour.
    KeyOrderAcrossBlocks Error "key-order-across-blocks"
        "root {root}, block {block}, slot {slot}: key {have} is not below {limit}, where the next block begins" {
        root: RootId, block: LogicalAddr, slot: u64, have: Key, limit: Key,
    }
    /// A block has several parents, and one of them says something else of it.
    ParentDisagrees Error "parent-disagrees"
        "root {root}, block {block}: parent {parent} says {what} {expect}, the block {have}" {
        root: RootId, block: LogicalAddr, parent: LogicalAddr, what: &'static str, have: String,
        expect: String,
    }
    /// A block of the future.
    BlockGeneration Error "block-generation"
        "root {root}, block {block}: generation {have} is above {limit}" {
        root: RootId, block: LogicalAddr, have: Generation, limit: Generation,
    }
    /// A child that is newer than the node: it was written again where it is.
    PointerGeneration Error "pointer-generation"
        "root {root}, block {block}, slot {slot}: a child of generation {have} below a block of {limit}" {
        root: RootId, block: LogicalAddr, slot: u64, have: Generation, limit: Generation,
    }
    /// Blocks could not be read; what only they could tell was not judged.
    Incomplete Note "incomplete"
        "{blocks} blocks could not be used: what depends on them was not judged" {
        blocks: u64,
    }

    // Extents and references.

    /// An extent's count of references is not the sum of those listed.
    ExtentRefs Error "extent-refs"
        "extent {bytenr}: {have} references, {expect} are listed" {
        bytenr: LogicalAddr, have: u64, expect: u64,
    }
    /// A back reference is missing, too many, or not what the trees say.
    WrongReference Error "wrong-reference"
        "extent {bytenr}: the extent tree has the reference {have}, the trees ask for {expect}" {
        bytenr: LogicalAddr, have: Maybe<Reference>, expect: Maybe<Reference>,
    }
    /// The references of an extent are wrong in a way that no other finding tells.
    ReferencesDisagree Error "references-disagree"
        "extent {bytenr}: its references are not what the trees ask for" {
        bytenr: LogicalAddr,
    }
    /// The flag FULL_BACKREF of a block contradicts how its children are referenced.
    FullBackref Error "full-backref"
        "block {block}: FULL_BACKREF is {have}, its children's references ask for {expect}" {
        block: LogicalAddr, have: u64, expect: u64,
    }
    /// An extent that nothing refers to.
    ExtentUnreferenced Error "extent-unreferenced"
        "extent {bytenr} of {len_bytes} bytes: nothing refers to it" {
        bytenr: LogicalAddr, len_bytes: u64,
    }
    /// A file refers to an extent that is not in the extent tree.
    ExtentMissing Error "extent-missing"
        "root {root}, block {block}, inode {inode}, offset {offset}: extent {bytenr} is not in the extent tree" {
        root: RootId, block: LogicalAddr, inode: InodeNo, offset: u64, bytenr: LogicalAddr,
    }
    /// A tree block that is not in the extent tree.
    BlockNotInExtentTree Error "block-not-in-extent-tree"
        "root {root}, block {block}: not in the extent tree" {
        root: RootId, block: LogicalAddr,
    }
    /// The extent tree says something else of an extent than what refers to it.
    ExtentDisagrees Error "extent-disagrees"
        "extent {bytenr}: its {what} is {have}, what refers to it says {expect}" {
        bytenr: LogicalAddr, what: &'static str, have: String, expect: String,
    }
    /// Two extents overlap.
    ExtentOverlap Error "extent-overlap"
        "extent {bytenr} overlaps the extent {previous} of {previous_bytes} bytes" {
        bytenr: LogicalAddr, previous: LogicalAddr, previous_bytes: u64,
    }
    /// An extent of the future.
    ExtentGeneration Error "extent-generation"
        "extent {bytenr}: generation {have} is above {limit}" {
        bytenr: LogicalAddr, have: Generation, limit: Generation,
    }
    /// A tree block that crosses a border of 64 KiB.
    BlockCrossesStripe Error "block-crosses-stripe"
        "extent {bytenr}: the tree block crosses the border of a stripe at {border}" {
        bytenr: LogicalAddr, border: LogicalAddr,
    }
    /// A tree block whose address is no multiple of its length, of which `btrfs check` warns.
    BlockUnaligned Note "block-unaligned"
        "extent {bytenr}: the tree block's address is no multiple of its length, {len_bytes}" {
        bytenr: LogicalAddr, len_bytes: u64,
    }
    /// A keyed data reference whose key is not its hash.
    ReferenceKey Error "reference-key"
        "block {block}, slot {slot}: reference {key} should have the offset {expect}" {
        block: LogicalAddr, slot: u64, key: Key, expect: u64,
    }
    /// A keyed reference to an extent that has no item.
    ReferenceWithoutExtent Error "reference-without-extent"
        "block {block}, slot {slot}: {key} belongs to no extent" {
        block: LogicalAddr, slot: u64, key: Key,
    }
    /// An extent that lies in no block group, or in one of another type.
    ExtentOutsideGroup Error "extent-outside-group"
        "extent {bytenr} of {len_bytes} bytes is not inside a block group for {what}" {
        bytenr: LogicalAddr, len_bytes: u64, what: &'static str,
    }

    // Chunks, devices, block groups, free space.

    /// A chunk that cannot be: overlapping, impossible, beyond the end of its device.
    BadChunk Error "bad-chunk" "chunk {chunk}: {error}" {
        chunk: LogicalAddr, error: String,
    }
    /// A stripe of a chunk has no device extent.
    DevExtentMissing Error "dev-extent-missing"
        "chunk {chunk}: its stripe at {offset} of device {device} has no device extent" {
        chunk: LogicalAddr, device: DeviceId, offset: PhysicalAddr,
    }
    /// A device extent that no chunk has a stripe for.
    DevExtentWithoutChunk Error "dev-extent-without-chunk"
        "device {device}: the extent at {offset} belongs to no stripe of chunk {chunk}" {
        device: DeviceId, offset: PhysicalAddr, chunk: LogicalAddr,
    }
    /// A device extent differs from its stripe, overlaps another or leaves its device.
    DevExtentWrong Error "dev-extent-wrong"
        "device {device}: the extent at {offset}: {what} is {have}, expect {expect}" {
        device: DeviceId, offset: PhysicalAddr, what: &'static str, have: u64, expect: u64,
    }
    /// A device's item is wrong.
    DeviceField Error "device-field"
        "device {device}: {field} is {have}, expect {expect}" {
        device: DeviceId, field: &'static str, have: u64, expect: u64,
    }
    /// A device's superblock says other than the chunk tree of how much of it there is or is used. Linux
    /// goes by the chunk tree, and up to 6.15 leaves the superblock behind where a commit drops a chunk and
    /// makes none.
    DeviceSuperblock Note "device-superblock"
        "device {device}: {field} is {have} in its superblock, {expect} in the chunk tree" {
        device: DeviceId, field: &'static str, have: u64, expect: u64,
    }
    /// A device ends before the filesystem on it does: Linux does not mount it.
    DeviceTooShort Error "device-too-short"
        "device {device}: it has {have} bytes, the filesystem on it takes {expect}" {
        device: DeviceId, have: u64, expect: u64,
    }
    /// A device's item names another device or filesystem than its superblock.
    DeviceIdentity Error "device-identity"
        "device {device}: {field} is {have} in the chunk tree, {expect} in its superblock" {
        device: DeviceId, field: &'static str, have: Uuid, expect: Uuid,
    }
    /// A chunk has no block group.
    GroupMissing Error "group-missing" "chunk {chunk} has no block group" {
        chunk: LogicalAddr,
    }
    /// A block group has no chunk.
    GroupWithoutChunk Error "group-without-chunk" "block group {group} has no chunk" {
        group: LogicalAddr,
    }
    /// A block group and its chunk disagree.
    GroupDisagrees Error "group-disagrees"
        "block group {group}: {what} is {have}, its chunk says {expect}" {
        group: LogicalAddr, what: &'static str, have: String, expect: String,
    }
    /// A block group's count of used bytes is not the sum of its extents.
    GroupUsed Error "group-used"
        "block group {group}: used is {have}, its extents take {expect}" {
        group: LogicalAddr, have: u64, expect: u64,
    }
    /// The free space tree is not marked as valid; Linux makes it anew.
    FreeSpaceTreeInvalid Note "free-space-tree-invalid"
        "the free space tree is not marked as valid: Linux makes it anew" {}
    /// The free space cache of the first version is not judged: Linux does not depend on it.
    SpaceCacheV1 Note "space-cache-v1" "the free space cache (v1) was not judged" {}
    /// A block group without free space information.
    FreeSpaceMissing Error "free-space-missing"
        "free space tree: nothing is said of block group {group}" {
        group: LogicalAddr,
    }
    /// Free space of a group that does not exist, as mkfs.btrfs before 6.16.1 leaves it.
    FreeSpaceWithoutGroup Note "free-space-without-group"
        "free space tree: {key} belongs to no block group" {
        key: Key,
    }
    /// Information whose length is not its group's, or an item that leaves its group.
    FreeSpaceKey Error "free-space-key"
        "free space tree: {key} does not fit the block group {group}" {
        key: Key, group: LogicalAddr,
    }
    /// The count of free extents is wrong.
    FreeSpaceCount Error "free-space-count"
        "free space of block group {group}: {have} extents by its count, {expect} by its items" {
        group: LogicalAddr, have: u64, expect: u64,
    }
    /// Two free extents that touch.
    FreeSpaceUnmerged Error "free-space-unmerged"
        "free space of block group {group}: two extents touch at {at}" {
        group: LogicalAddr, at: LogicalAddr,
    }
    /// A free extent or bitmap that begins inside the one before it.
    FreeSpaceOverlap Error "free-space-overlap"
        "free space of block group {group}: {key} begins before {previous_end}, where the item before it ends" {
        group: LogicalAddr, key: Key, previous_end: LogicalAddr,
    }
    /// Bitmaps where extents are announced, or the other way round.
    FreeSpaceForm Error "free-space-form"
        "free space of block group {group}: {key} is not of the form that its flag says" {
        group: LogicalAddr, key: Key,
    }
    /// A range is free in one tree and used in the other.
    FreeSpaceDiffers Error "free-space-differs"
        "free space of block group {group}: {len_bytes} bytes at {at} are {have} there, {expect} in the extent tree" {
        group: LogicalAddr, at: LogicalAddr, len_bytes: u64, have: &'static str,
        expect: &'static str,
    }

    // Checksums.

    /// Checksums of a range twice.
    CsumOverlap Error "csum-overlap"
        "checksum tree: {key} begins before {previous_end}, where the item before it ends" {
        key: Key, previous_end: LogicalAddr,
    }
    /// Checksums of space that no data extent covers.
    CsumWithoutExtent Error "csum-without-extent"
        "checksum tree: {len_bytes} bytes at {at} have checksums and are no data" {
        at: LogicalAddr, len_bytes: u64,
    }
    /// Data of a file that should have checksums has none.
    CsumMissing Error "csum-missing"
        "root {root}, block {block}, inode {inode}, offset {offset}: checksums are missing at {at}" {
        root: RootId, block: LogicalAddr, inode: InodeNo, offset: u64, at: LogicalAddr,
    }
    /// Checksums of data that should have none: preallocated, or of a file without checksums.
    CsumUnwanted Error "csum-unwanted"
        "root {root}, block {block}, inode {inode}, offset {offset}: {what} has checksums at {at}" {
        root: RootId, block: LogicalAddr, inode: InodeNo, offset: u64, what: &'static str,
        at: LogicalAddr,
    }
    /// Data that is not what its checksum says.
    DataCsum Error "data-csum"
        "data at {at}, {len_bytes} bytes: copy {mirror}, device {device}, offset {physical}, is not what its checksums say" {
        at: LogicalAddr, len_bytes: u64, mirror: u64, device: Maybe<DeviceId>,
        physical: Maybe<PhysicalAddr>,
    }
    /// Data that cannot be read.
    DataUnreadable Error "data-unreadable"
        "data at {at}, {len_bytes} bytes: copy {mirror}: {error}" {
        at: LogicalAddr, len_bytes: u64, mirror: u64, error: String,
    }

    // Files.

    /// Items of an inode that has no inode item.
    InodeMissing Error "inode-missing"
        "root {root}, block {block}: inode {inode} has items and no inode item" {
        root: RootId, block: LogicalAddr, inode: InodeNo,
    }
    /// An inode of no generation, or of the future.
    InodeGeneration Error "inode-generation"
        "root {root}, block {block}, inode {inode}: {field} is {have}, expect 1 to {limit}" {
        root: RootId, block: LogicalAddr, inode: InodeNo, field: &'static str, have: Generation,
        limit: Generation,
    }
    /// A link count is not the number of names.
    InodeLinks Error "inode-links"
        "root {root}, block {block}, inode {inode}: {have} links, {expect} names" {
        root: RootId, block: LogicalAddr, inode: InodeNo, have: u64, expect: u64,
    }
    /// An inode's count of bytes is not the sum of its extents.
    InodeBytes Error "inode-nbytes"
        "root {root}, block {block}, inode {inode}: nbytes is {have}, its extents take {expect}" {
        root: RootId, block: LogicalAddr, inode: InodeNo, have: u64, expect: u64,
    }
    /// The size of a directory is not twice the length of its names.
    DirectorySize Error "directory-size"
        "root {root}, block {block}, inode {inode}: the directory's size is {have}, its names make {expect}" {
        root: RootId, block: LogicalAddr, inode: InodeNo, have: u64, expect: u64,
    }
    /// The size of a symbolic link is not its target's length.
    SymlinkSize Error "symlink-size"
        "root {root}, block {block}, inode {inode}: the symbolic link's size is {have}, its target takes {expect}" {
        root: RootId, block: LogicalAddr, inode: InodeNo, have: u64, expect: u64,
    }
    /// An inode has flags that one of its type cannot have.
    InodeFlags Error "inode-flags"
        "root {root}, block {block}, inode {inode}: a symbolic link with the flags {have:#x}" {
        root: RootId, block: LogicalAddr, inode: InodeNo, have: u64,
    }
    /// An inode has flags in the upper half that nobody knows: Linux reads it only where it is mounted
    /// read-only.
    InodeFlagsUnknown Error "inode-flags-unknown"
        "root {root}, block {block}, inode {inode}: the unknown flags {have:#x}" {
        root: RootId, block: LogicalAddr, inode: InodeNo, have: u64,
    }
    /// An inode has items that one of its type cannot have.
    InodeItems Error "inode-items"
        "root {root}, block {block}, inode {inode}: mode {mode:#o} and {what}" {
        root: RootId, block: LogicalAddr, inode: InodeNo, mode: u64, what: &'static str,
    }
    /// File extents overlap.
    FileExtentOverlap Error "file-extent-overlap"
        "root {root}, block {block}, inode {inode}, offset {offset}: overlaps the file extent before it, which ends at {previous_end}" {
        root: RootId, block: LogicalAddr, inode: InodeNo, offset: u64, previous_end: u64,
    }
    /// A file extent with impossible fields.
    FileExtentField Error "file-extent-field"
        "root {root}, block {block}, inode {inode}, offset {offset}: {what} is {have}, expect {expect}" {
        root: RootId, block: LogicalAddr, inode: InodeNo, offset: u64, what: &'static str,
        have: u64, expect: String,
    }
    /// A hole without a file extent, though the format asks for one.
    FileHole Error "file-hole"
        "root {root}, block {block}, inode {inode}, offset {offset}: a hole has no file extent" {
        root: RootId, block: LogicalAddr, inode: InodeNo, offset: u64,
    }
    /// An extended reference whose key is not its hash.
    ExtrefHash Error "extref-hash"
        "root {root}, block {block}, slot {slot}: {key} of the name {name} should have the offset {expect}" {
        root: RootId, block: LogicalAddr, slot: u64, key: Key, name: Name, expect: u64,
    }
    /// A name stands twice in a directory, or an attribute twice at an inode.
    DuplicateName Error "duplicate-name"
        "root {root}, inode {inode}: the name {name} is there twice" {
        root: RootId, inode: InodeNo, name: Name,
    }
    /// A name has no DIR_ITEM.
    DirItemMissing Error "dir-item-missing"
        "root {root}, directory {directory}: the name {name} has no DIR_ITEM" {
        root: RootId, directory: InodeNo, name: Name,
    }
    /// A name has no DIR_INDEX.
    DirIndexMissing Error "dir-index-missing"
        "root {root}, directory {directory}: the name {name} has no DIR_INDEX" {
        root: RootId, directory: InodeNo, name: Name,
    }
    /// The inode that a name leads to does not know it.
    InodeRefMissing Error "inode-ref-missing"
        "root {root}, directory {directory}: inode {inode} has no reference for the name {name}, index {index}" {
        root: RootId, directory: InodeNo, name: Name, index: u64, inode: InodeNo,
    }
    /// An inode knows a name that its directory does not have.
    DirEntryMissing Error "dir-entry-missing"
        "root {root}, directory {directory}: no entry {name}, index {index}, for inode {inode}" {
        root: RootId, directory: InodeNo, name: Name, index: u64, inode: InodeNo,
    }
    /// The two items of a name differ in what they lead to.
    DirEntriesDiffer Error "dir-entries-differ"
        "root {root}, directory {directory}, name {name}: DIR_ITEM leads to {have}, DIR_INDEX to {expect}" {
        root: RootId, directory: InodeNo, name: Name, have: String, expect: String,
    }
    /// A directory entry's type is not its inode's.
    FileTypeDiffers Error "file-type-differs"
        "root {root}, directory {directory}, name {name}: file type {have}, the inode's is {expect}" {
        root: RootId, directory: InodeNo, name: Name, have: u64, expect: u64,
    }
    /// The names of a tree do not agree in a way that no other finding tells.
    NamesDisagree Error "names-disagree" "root {root}: its names do not agree" {
        root: RootId,
    }
    /// An inode without a name that no orphan item remembers.
    OrphanMissing Error "orphan-missing"
        "root {root}: inode {inode} has no name and no orphan item" {
        root: RootId, inode: InodeNo,
    }

    // Roots.

    /// A tree that every filesystem has is missing.
    RootMissing Error "root-missing" "root {root}: missing" {
        root: RootId,
    }
    /// A root item with an impossible field.
    RootField Error "root-field"
        "root {root}: {field} is {have}, expect {expect}" {
        root: RootId, field: &'static str, have: String, expect: String,
    }
    /// A subvolume to which no names lead from the top-level one.
    SubvolumeUnreferenced Error "subvolume-unreferenced"
        "root {root}: a subvolume to which no names lead from the top" {
        root: RootId,
    }
    /// A name of a subvolume whose counterpart is missing.
    RootRefMissing Error "root-ref-missing"
        "root {root} in root {parent}: no {what}" {
        root: RootId, parent: RootId, what: &'static str,
    }
    /// The two items that name a subvolume differ.
    RootRefsDiffer Error "root-refs-differ"
        "root {root} in root {parent}: ROOT_REF and ROOT_BACKREF differ" {
        root: RootId, parent: RootId,
    }
    /// A deleted subvolume that no orphan item remembers.
    RootOrphanMissing Error "root-orphan-missing"
        "root {root}: deleted, and no orphan item remembers it" {
        root: RootId,
    }
    /// The default subvolume does not exist.
    DefaultSubvolume Error "default-subvolume"
        "the default subvolume {root} does not exist" {
        root: RootId,
    }
    /// A subvolume that the uuid tree does not list.
    UuidMissing Error "uuid-missing"
        "root {root}: its {what} {uuid} is not in the uuid tree" {
        root: RootId, what: &'static str, uuid: Uuid,
    }
    /// The uuid tree lists what is not so; Linux ignores such entries.
    UuidStale Note "uuid-stale"
        "uuid tree: {uuid} leads to root {root}, which does not have it" {
        root: RootId, uuid: Uuid,
    }
    /// Quotas are not judged beyond their structure.
    QuotasNotJudged Note "quotas-not-judged" "quotas were not judged" {}
    /// A log that is not empty; Linux replays it at the next mount.
    LogPresent Note "log-present"
        "there is a log to be replayed: of it only the structure was judged" {}
}
