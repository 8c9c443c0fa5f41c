//! A tar archive as a source, whatever wrote it and compressed it.
//!
//! Read once from front to back, so that it may come through a pipe. Read are ustar, GNU, star
//! and PAX archives with long names, large and negative numbers, times below the second, extended
//! attributes, access control lists and sparse files of every version. Owners are taken by
//! number.
//!
//! Names never lead out of the tree: a leading `/` is removed and said so, `..` is refused, and
//! what lies below a symbolic link is refused by the sink, which knows what is one.

mod header;
mod pax;
mod reader;
mod sparse;
#[cfg(test)]
mod tests;

pub use header::{BLOCK_BYTES, Block, checksum};

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use ubtrfs_rt::{Executor, Time};

use crate::acl;
use crate::batch::{Batch, Content, Entry, LinkTarget, PIECE_BYTES_MAX, Place, Source, Step};
use crate::codec;
use crate::entry::{DeviceNumber, Metadata, PERMISSION_BITS, Segment, Special, align_segments};
use crate::error::{ArchiveProblem, BytePath, Error, Result, WarningKind};
use header::{Header, MemberType, decimal, decimal_time};
use pax::{Records, Xattrs};
use reader::{Input, Trouble};
use sparse::{Map, MapReader, PaxSparse};

/// A longer extended header or long name is refused: it is kept in memory.
const EXTENSION_BYTES_MAX: u64 = 16 << 20;

/// Longer global records are refused: they are looked at for every member.
const GLOBAL_BYTES_MAX: usize = 64 << 10;

/// A longer path is refused.
const PATH_BYTES_MAX: usize = 1 << 20;

/// The longest target of a symbolic link.
const SYMLINK_BYTES_MAX: usize = 4095;

/// Content of a member that is being handed out.
#[derive(Debug)]
struct Body {
    path: Vec<u8>,
    /// What the archive holds and has not been read yet.
    held: std::iter::Peekable<std::vec::IntoIter<Segment>>,
    /// What is handed out, at multiples of the alignment.
    wanted: std::vec::IntoIter<Segment>,
    current: Segment,
    padding_bytes: u64,
}

/// Headers that come before a member and tell of it.
#[derive(Debug, Default)]
struct Extensions {
    records: Records,
    has_pax: bool,
    long_name: Option<Vec<u8>>,
    long_link: Option<Vec<u8>>,
}

/// A tar archive that is being read.
#[derive(Debug)]
pub struct TarSource {
    input: Input,
    align_bytes: u64,
    globals: Records,
    body: Option<Body>,
    absolute_seen: bool,
    ended: bool,
}

/// The content of a file in an archive comes with the archive.
type Data = Vec<u8>;

impl TarSource {
    /// Opens an archive, compressed or not; `-` is standard input. Pieces of files begin at
    /// multiples of `align_bytes`.
    ///
    /// # Errors
    /// It cannot be opened or read.
    pub fn open(path: &Path, align_bytes: u64, executor: Executor) -> Result<Self> {
        let name = path.as_os_str().as_bytes();
        let input: Box<dyn Read + Send> = if name == b"-" {
            Box::new(io::stdin())
        } else {
            Box::new(File::open(path).map_err(|e| Error::failed("open", name, e))?)
        };
        Self::new(input, align_bytes, executor)
    }

    /// Reads an archive, compressed or not, from anything.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn new(input: Box<dyn Read + Send>, align_bytes: u64, executor: Executor) -> Result<Self> {
        let input = codec::decoder(input, executor).map_err(|e| Error::Archive {
            member: None,
            offset: 0,
            problem: ArchiveProblem::Read(e),
        })?;
        Ok(Self {
            input: Input::new(input),
            align_bytes: align_bytes.max(1),
            globals: Records::default(),
            body: None,
            absolute_seen: false,
            ended: false,
        })
    }

    /// The next member; `false` at the end of the archive.
    fn member(&mut self, batch: &mut Batch<Data>) -> Result<bool> {
        let mut extensions = Extensions { records: self.globals.clone(), ..Extensions::default() };
        loop {
            let at = self.input.offset();
            let Some(block) = self.next_header(batch).map_err(|t| t.error(None, at))? else {
                return Ok(false);
            };
            let name = |block: &Block| Header::new(block).map(|header| header.path()).ok();
            match self.header(batch, &block, &mut extensions) {
                Ok(true) => return Ok(true),
                Ok(false) => {}
                Err(trouble) => {
                    let member = extensions.records.value(b"path").map(<[u8]>::to_vec);
                    let member = member.or(extensions.long_name).or_else(|| name(&block));
                    return Err(trouble.error(member, at));
                }
            }
        }
    }

    /// The next block that is not zeros; `None` at the end of the archive.
    fn next_header(&mut self, batch: &mut Batch<Data>) -> Result<Option<Block>, Trouble> {
        let mut zeros = 0;
        loop {
            match self.input.block()? {
                None if self.input.offset() == 0 => return Err(ArchiveProblem::Empty.into()),
                None => {
                    if zeros == 0 {
                        batch.warn(BytePath::default(), WarningKind::NoEndMarker);
                    }
                    return Ok(None);
                }
                Some(block) if block.iter().all(|&byte| byte == 0) => zeros += 1,
                Some(block) => return Ok(Some(block)),
            }
            if zeros == 2 {
                // What compressed it may have a checksum at its end, and a pipe wants to be read.
                self.input.drain()?;
                return Ok(None);
            }
        }
    }

    /// Reads a header and what belongs to it. `false`: it was one of the next member's.
    fn header(
        &mut self,
        batch: &mut Batch<Data>,
        block: &Block,
        extensions: &mut Extensions,
    ) -> Result<bool, Trouble> {
        let is_first = self.input.offset() == BLOCK_BYTES as u64;
        let header = Header::new(block)
            .map_err(|problem| if is_first { ArchiveProblem::NotTar } else { problem })?;
        let size = header.size()?;
        let size = u64::try_from(size).map_err(|_| ArchiveProblem::BadNumber { field: "size" })?;
        match header.member_type() {
            MemberType::Pax => {
                // Several for one member count together, what is global included.
                let have_bytes = extensions.records.len_bytes() as u64;
                let bytes = self.extension(size.saturating_add(have_bytes), size)?;
                extensions.records.extend(Records::parse(&bytes)?);
                extensions.has_pax = true;
                return Ok(false);
            }
            MemberType::PaxGlobal => {
                let records = Records::parse(&self.extension(size, size)?)?;
                self.globals.extend(records.clone());
                let (bytes, limit_bytes) = (self.globals.len_bytes(), GLOBAL_BYTES_MAX);
                if bytes > limit_bytes {
                    let (what, bytes) = ("global extended header", bytes as u64);
                    let limit_bytes = limit_bytes as u64;
                    return Err(ArchiveProblem::TooLarge { what, bytes, limit_bytes }.into());
                }
                extensions.records.extend(records);
                return Ok(false);
            }
            MemberType::GnuLongName => {
                extensions.long_name = Some(header::text(&self.extension(size, size)?).to_vec());
                return Ok(false);
            }
            MemberType::GnuLongLink => {
                extensions.long_link = Some(header::text(&self.extension(size, size)?).to_vec());
                return Ok(false);
            }
            _ => {}
        }
        let size = match extensions.records.value(b"size") {
            Some(digits) => decimal(digits, "size")?,
            None => size,
        };
        self.put(batch, &header, size, extensions)?;
        Ok(true)
    }

    /// The content of a header of `size` bytes that tells of a member, where all that tell of it have
    /// `total_bytes`.
    fn extension(&mut self, total_bytes: u64, size: u64) -> Result<Vec<u8>, Trouble> {
        if total_bytes > EXTENSION_BYTES_MAX {
            let what = "extended header";
            let (bytes, limit_bytes) = (total_bytes, EXTENSION_BYTES_MAX);
            return Err(ArchiveProblem::TooLarge { what, bytes, limit_bytes }.into());
        }
        let bytes = self.input.bytes(size)?;
        self.input.skip(padding(size))?;
        Ok(bytes)
    }

    /// Hands out the member itself.
    fn put(
        &mut self,
        batch: &mut Batch<Data>,
        header: &Header<'_>,
        size: u64,
        extensions: &mut Extensions,
    ) -> Result<(), Trouble> {
        let records = &extensions.records;
        let sparse = PaxSparse::find(records)?;
        let named = sparse.as_ref().and(records.value(b"GNU.sparse.name"));
        let raw_path = named
            .or(records.value(b"path"))
            .map(<[u8]>::to_vec)
            .or(extensions.long_name.take())
            .unwrap_or_else(|| header.path());
        let path = self.clean(batch, &raw_path, "name")?;
        let raw_link = records
            .value(b"linkpath")
            .map(<[u8]>::to_vec)
            .or(extensions.long_link.take())
            .unwrap_or_else(|| header.link_path().to_vec());
        let mut member_type = header.member_type();
        // Before ustar, a name that ends in "/" was how a directory was told.
        if member_type == MemberType::Regular && raw_path.ends_with(b"/") {
            member_type = MemberType::Directory;
        }
        if path.is_empty()
            && !matches!(
                member_type,
                MemberType::Directory | MemberType::GnuDumpDir | MemberType::GnuVolume
            )
        {
            let why = "it is empty";
            return Err(ArchiveProblem::BadName { what: "name", why }.into());
        }
        let special = match member_type {
            MemberType::Regular | MemberType::GnuSparse => {
                let entry = entry(batch, &path, header, records)?;
                return self.put_file(batch, header, size, sparse, entry, path);
            }
            MemberType::Directory | MemberType::GnuDumpDir => {
                let entry = entry(batch, &path, header, records)?;
                batch.push(Step::Directory(entry), 0);
                // One that was told by its name may have content, as any file.
                if header.member_type() != MemberType::Directory {
                    self.input.skip(size.saturating_add(padding(size)))?;
                }
                return Ok(());
            }
            MemberType::HardLink => {
                let target = self.clean(batch, &raw_link, "link target")?;
                let place = Place::Path(batch.span(&path));
                let target = LinkTarget::Path(batch.span(&target));
                batch.push(Step::Link { place, target }, 0);
                // Only archives with extended headers may repeat the content here.
                if extensions.has_pax {
                    self.input.skip(size.saturating_add(padding(size)))?;
                }
                return Ok(());
            }
            MemberType::Symlink => {
                let why = match raw_link.len() {
                    0 => Some("it is empty"),
                    len if len > SYMLINK_BYTES_MAX => Some("it is longer than 4095 bytes"),
                    _ if raw_link.contains(&0) => Some("it has a NUL byte"),
                    _ => None,
                };
                if let Some(why) = why {
                    return Err(ArchiveProblem::BadName { what: "link target", why }.into());
                }
                Special::Symlink(batch.span(&raw_link))
            }
            MemberType::CharDevice => Special::CharDevice(device(header, records)?),
            MemberType::BlockDevice => Special::BlockDevice(device(header, records)?),
            MemberType::Fifo => Special::Fifo,
            MemberType::GnuMultiVolume => {
                let what = "archives in several volumes";
                return Err(ArchiveProblem::Unsupported { what }.into());
            }
            MemberType::GnuVolume => return Ok(()),
            MemberType::Other(letter) => {
                batch.warn(path, WarningKind::MemberSkipped(char::from(letter)));
                self.input.skip(size.saturating_add(padding(size)))?;
                return Ok(());
            }
            MemberType::Pax
            | MemberType::PaxGlobal
            | MemberType::GnuLongName
            | MemberType::GnuLongLink => return Ok(()),
        };
        let entry = entry(batch, &path, header, records)?;
        batch.push(Step::Special { entry, special, identity: None }, 0);
        Ok(())
    }

    fn put_file(
        &mut self,
        batch: &mut Batch<Data>,
        header: &Header<'_>,
        stored_bytes: u64,
        sparse: Option<PaxSparse>,
        entry: Entry,
        path: Vec<u8>,
    ) -> Result<(), Trouble> {
        let padding_bytes = padding(stored_bytes);
        let (size_bytes, held) = match sparse {
            _ if header.member_type() == MemberType::GnuSparse => {
                let (entries, mut more, size) = header.gnu_sparse()?;
                let field = "sparse file's length";
                let size = u64::try_from(size).map_err(|_| ArchiveProblem::BadNumber { field })?;
                let mut map = Map::default();
                map.push_old(entries)?;
                while more {
                    more = map.push_extension(&self.input.whole_block()?)?;
                }
                (size, Some(map.finish(size, stored_bytes)?))
            }
            Some(PaxSparse::InHeader { map, size_bytes }) => {
                (size_bytes, Some(map.finish(size_bytes, stored_bytes)?))
            }
            Some(PaxSparse::BeforeContent { size_bytes }) => {
                let mut reader = MapReader::default();
                let mut content_bytes = stored_bytes;
                let map = loop {
                    content_bytes = content_bytes
                        .checked_sub(BLOCK_BYTES as u64)
                        .ok_or(ArchiveProblem::BadSparse { why: "it does not end" })?;
                    if let Some(map) = reader.push(&self.input.whole_block()?)? {
                        break map;
                    }
                };
                (size_bytes, Some(map.finish(size_bytes, content_bytes)?))
            }
            None => (stored_bytes, None),
        };
        if i64::try_from(size_bytes).is_err() {
            return Err(ArchiveProblem::BadNumber { field: "size" }.into());
        }
        self.put_content(batch, entry, path, size_bytes, held, padding_bytes)
    }

    fn put_content(
        &mut self,
        batch: &mut Batch<Data>,
        entry: Entry,
        path: Vec<u8>,
        size_bytes: u64,
        held: Option<Vec<Segment>>,
        padding_bytes: u64,
    ) -> Result<(), Trouble> {
        let identity = None;
        let segments = held.as_ref().map(|held| align_segments(held, self.align_bytes, size_bytes));
        if size_bytes == 0 || segments.as_ref().is_some_and(Vec::is_empty) {
            let content = Content::Empty;
            batch.push(Step::File { entry, size_bytes, content, identity }, 0);
            return self.input.skip(padding_bytes);
        }
        let whole = Segment { offset: 0, len_bytes: size_bytes };
        match usize::try_from(size_bytes) {
            Ok(len_bytes) if len_bytes <= PIECE_BYTES_MAX && held.is_none() => {
                let content = Content::Whole(self.input.bytes(size_bytes)?);
                self.input.skip(padding_bytes)?;
                batch.push(Step::File { entry, size_bytes, content, identity }, len_bytes);
            }
            _ => {
                let wanted = segments.clone().unwrap_or_else(|| vec![whole]);
                let content = Content::Pieces { segments };
                batch.push(Step::File { entry, size_bytes, content, identity }, 0);
                self.body = Some(Body {
                    path,
                    held: held.unwrap_or_else(|| vec![whole]).into_iter().peekable(),
                    wanted: wanted.into_iter(),
                    current: Segment { offset: 0, len_bytes: 0 },
                    padding_bytes,
                });
            }
        }
        Ok(())
    }

    /// Hands out the next piece of the body.
    fn piece(&mut self, batch: &mut Batch<Data>) -> Result<(), Trouble> {
        let Some(body) = &mut self.body else { return Ok(()) };
        if body.current.len_bytes == 0 {
            match body.wanted.next() {
                Some(segment) => body.current = segment,
                None => {
                    self.input.skip(body.padding_bytes)?;
                    batch.push(Step::End, 0);
                    self.body = None;
                    return Ok(());
                }
            }
        }
        let len = body.current.len_bytes.min(PIECE_BYTES_MAX as u64);
        let piece = Segment { offset: body.current.offset, len_bytes: len };
        body.current.offset += len;
        body.current.len_bytes -= len;
        let len_bytes = usize::try_from(len).expect("at most a piece");
        let mut data = Vec::with_capacity(len_bytes);
        while let Some(held) = body.held.peek_mut()
            && held.offset < piece.end()
        {
            let gap = held.offset - piece.offset;
            data.resize(usize::try_from(gap).expect("within the piece"), 0);
            let take = held.end().min(piece.end()) - held.offset;
            self.input.append(take, &mut data)?;
            held.offset += take;
            held.len_bytes -= take;
            if held.len_bytes == 0 {
                body.held.next();
            }
        }
        data.resize(len_bytes, 0);
        batch.push(Step::Data { offset: piece.offset, len_bytes, data }, len_bytes);
        Ok(())
    }

    /// The components of a name, without what does not count.
    fn clean(
        &mut self,
        batch: &mut Batch<Data>,
        raw: &[u8],
        what: &'static str,
    ) -> Result<Vec<u8>, Trouble> {
        let bad = |why| ArchiveProblem::BadName { what, why };
        if raw.len() > PATH_BYTES_MAX {
            return Err(bad("it is too long").into());
        }
        if raw.contains(&0) {
            return Err(bad("it has a NUL byte").into());
        }
        if raw.starts_with(b"/") && !self.absolute_seen {
            self.absolute_seen = true;
            batch.warn(raw, WarningKind::AbsoluteName);
        }
        let mut path = Vec::with_capacity(raw.len());
        for component in raw.split(|&b| b == b'/') {
            match component {
                b"" | b"." => {}
                b".." => return Err(ArchiveProblem::ParentComponent { what }.into()),
                _ => {
                    if !path.is_empty() {
                        path.push(b'/');
                    }
                    path.extend_from_slice(component);
                }
            }
        }
        Ok(path)
    }
}

impl Source for TarSource {
    type Load = Data;

    fn fill(&mut self, batch: &mut Batch<Data>) -> Result<bool> {
        if let Some(body) = &self.body {
            batch.file.clone_from(&body.path);
        }
        while !batch.is_full() && !self.ended {
            if let Some(body) = &self.body {
                let path = body.path.clone();
                let result = self.piece(batch);
                result.map_err(|trouble| trouble.error(Some(path), self.input.offset()))?;
            } else {
                self.ended = !self.member(batch)?;
            }
        }
        Ok(!self.ended)
    }
}

/// Bytes up to the next block.
fn padding(size: u64) -> u64 {
    size.wrapping_neg() % BLOCK_BYTES as u64
}

fn device(header: &Header<'_>, records: &Records) -> Result<DeviceNumber, ArchiveProblem> {
    const FIELD: &str = "device number";
    let (major, minor) = header.device()?;
    let or_record = |key: &[u8], value: i64| match records.value(key) {
        Some(digits) => decimal(digits, FIELD),
        None => u64::try_from(value).map_err(|_| ArchiveProblem::BadNumber { field: FIELD }),
    };
    // What Linux can number: 12 bits and 20 bits.
    let within = |number: u64, bits: u32| match u32::try_from(number) {
        Ok(number) if number >> bits == 0 => Ok(number),
        _ => Err(ArchiveProblem::BadNumber { field: FIELD }),
    };
    Ok(DeviceNumber {
        major: within(or_record(b"SCHILY.devmajor", major)?, 12)?,
        minor: within(or_record(b"SCHILY.devminor", minor)?, 20)?,
    })
}

/// The name, metadata and extended attributes of a member.
fn entry(
    batch: &mut Batch<Data>,
    path: &[u8],
    header: &Header<'_>,
    records: &Records,
) -> Result<Entry, Trouble> {
    let id = |key: &[u8], value: Result<i64, ArchiveProblem>, field| {
        let bad = || ArchiveProblem::BadNumber { field };
        match records.value(key) {
            Some(digits) => u32::try_from(decimal(digits, field)?).map_err(|_| bad()),
            None => u32::try_from(value?).map_err(|_| bad()),
        }
    };
    let mtime = match records.value(b"mtime") {
        Some(digits) => decimal_time(digits, "modification time")?,
        None => Time { sec: header.mtime()?, nsec: 0 },
    };
    let atime = match records.value(b"atime") {
        Some(digits) => decimal_time(digits, "access time")?,
        None => mtime,
    };
    let Xattrs { found, warnings, group_bits } = records.xattrs();
    let permissions = header.mode()? & i64::from(PERMISSION_BITS);
    let mut permissions = u32::try_from(permissions).expect("twelve bits");
    if let Some(acl) = found.get(&b"system.posix_acl_access"[..]) {
        // libarchive tells the group's own permissions, where the system tells the mask.
        permissions = acl::permissions(acl).map_or(permissions, |bits| permissions & !0o777 | bits);
    } else if let Some(bits) = group_bits {
        permissions = permissions & !0o070 | bits << 3;
    }
    let metadata = Metadata {
        permissions,
        uid: id(b"uid", header.uid(), "owner")?,
        gid: id(b"gid", header.gid(), "group")?,
        atime: Some(atime),
        mtime,
    };
    for warning in warnings {
        batch.warn(path, warning);
    }
    let place = Place::Path(batch.span(path));
    let xattrs = found.iter().filter_map(|(name, value)| batch.xattr(path, name, value)).collect();
    Ok(Entry { place, metadata, xattrs })
}
