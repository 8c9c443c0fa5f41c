//! A tar archive as a sink: POSIX PAX, read by GNU tar, bsdtar and this crate.
//!
//! Members are `./` and names below it, in the order in which they come. An extended header is
//! written only where the plain one cannot tell: long names, names that are not ASCII, times below
//! the second, large numbers, extended attributes (`SCHILY.xattr.*`, access control lists as
//! `SCHILY.acl.*` too) and sparse files (`GNU.sparse`, version 1.0). Access times are left out, so
//! that reading does not change an archive.

use std::collections::HashMap;
use std::io::{self, Write};

use super::Sink;
use crate::acl;
use crate::batch::{
    Batch, Content, Entry, Identity, LinkTarget, Place, Prepare, Step, Text, Unprepared,
};
use crate::entry::{Metadata, Segment, Special};
use crate::error::{Error, Result, Warning, WarningKind};
use crate::progress::Report;
use crate::source::tar::{BLOCK_BYTES, Block, checksum};

/// GNU tar writes so many blocks at once and fills the last.
const RECORD_BYTES: u64 = 20 * BLOCK_BYTES as u64;

/// The sink.
#[derive(Debug)]
pub struct TarSink<W> {
    output: W,
    written_bytes: u64,
    /// Path of the innermost directory entered, from the root.
    directory: Vec<u8>,
    /// Lengths of the paths of the directories around it; the root's is missing.
    parents: Vec<usize>,
    root_entered: bool,
    /// Bytes of padding behind the content that is coming.
    padding_bytes: u64,
    /// Files whose further names may come.
    links: HashMap<u64, Linked>,
    path: Vec<u8>,
}

/// A file that has more names.
#[derive(Debug)]
struct Linked {
    path: Vec<u8>,
    /// How many names may come.
    names_left: u32,
    /// Written with each name: there are readers that give the file what the last header says.
    metadata: Metadata,
}

/// What a header tells besides the metadata.
struct Member<'a> {
    letter: u8,
    size_bytes: u64,
    link: &'a [u8],
    device: (u32, u32),
}

impl Member<'_> {
    fn new(letter: u8) -> Self {
        Self { letter, size_bytes: 0, link: b"", device: (0, 0) }
    }
}

/// The records of an extended header.
#[derive(Default)]
struct PaxBuilder(Vec<u8>);

impl PaxBuilder {
    fn add(&mut self, key: &[u8], value: &[u8]) {
        // The length counts its own digits.
        let rest = key.len() + value.len() + 3;
        let mut len = rest + 1;
        while rest + len.to_string().len() != len {
            len = rest + len.to_string().len();
        }
        self.0.extend_from_slice(len.to_string().as_bytes());
        self.0.push(b' ');
        self.0.extend_from_slice(key);
        self.0.push(b'=');
        self.0.extend_from_slice(value);
        self.0.push(b'\n');
    }

    fn add_number(&mut self, key: &[u8], value: impl ToString) {
        self.add(key, value.to_string().as_bytes());
    }
}

impl<W: Write> TarSink<W> {
    /// Writes an archive to `output`, uncompressed.
    pub fn new(output: W) -> Self {
        Self {
            output,
            written_bytes: 0,
            directory: Vec::new(),
            parents: Vec::new(),
            root_entered: false,
            padding_bytes: 0,
            links: HashMap::new(),
            path: Vec::new(),
        }
    }

    /// The output, to which everything was written if [`Sink::finish`] was called.
    pub fn into_output(self) -> W {
        self.output
    }

    fn step(&mut self, step: Step<Vec<u8>>, text: &Text, report: &mut Report<'_>) -> Result<()> {
        match step {
            Step::Enter(entry) => {
                self.locate(entry.place, text);
                if self.root_entered {
                    self.parents.push(self.directory.len());
                    self.directory.clone_from(&self.path);
                }
                self.root_entered = true;
                report.done.directories += 1;
                self.header(&entry, text, &Member::new(b'5'), PaxBuilder::default(), report)
            }
            Step::Leave => {
                self.directory.truncate(self.parents.pop().unwrap_or(0));
                Ok(())
            }
            Step::File { entry, size_bytes, content, identity } => {
                self.locate(entry.place, text);
                self.remember(identity, &entry);
                report.done.files += 1;
                self.put_file(&entry, size_bytes, content, text, report)
            }
            Step::Data { len_bytes, data, .. } => {
                report.done.data_bytes += len_bytes as u64;
                self.write(&data)
            }
            Step::End => self.pad(),
            Step::Special { entry, special, identity } => {
                self.locate(entry.place, text);
                self.remember(identity, &entry);
                let mut member = match special {
                    Special::Symlink(_) => Member::new(b'2'),
                    Special::CharDevice(_) => Member::new(b'3'),
                    Special::BlockDevice(_) => Member::new(b'4'),
                    Special::Fifo => Member::new(b'6'),
                    Special::Socket => {
                        self.links.retain(|_, linked| linked.path != self.path);
                        self.warn(report, WarningKind::NotInTar { what: special.name() });
                        return Ok(());
                    }
                };
                match special {
                    Special::Symlink(target) => {
                        member.link = text.bytes(target);
                        report.done.symlinks += 1;
                    }
                    Special::CharDevice(n) | Special::BlockDevice(n) => {
                        member.device = (n.major, n.minor);
                        report.done.specials += 1;
                    }
                    Special::Fifo | Special::Socket => report.done.specials += 1,
                }
                self.header(&entry, text, &member, PaxBuilder::default(), report)
            }
            Step::Link { place, target } => self.put_link(place, target, text, report),
            Step::Directory(Entry { place, .. }) => {
                let why = "an archive's paths cannot be written to another archive";
                Err(Error::refused(text.bytes(place.span()), why))
            }
            Step::Warning(warning) => {
                report.warn(&warning);
                Ok(())
            }
        }
    }

    fn put_file(
        &mut self,
        entry: &Entry,
        size_bytes: u64,
        content: Content<Vec<u8>>,
        text: &Text,
        report: &mut Report<'_>,
    ) -> Result<()> {
        let whole = Segment { offset: 0, len_bytes: size_bytes };
        let segments = match &content {
            Content::Empty if size_bytes > 0 => Some(&[][..]),
            Content::Pieces { segments: Some(segments) } if *segments != [whole] => {
                Some(&segments[..])
            }
            _ => None,
        };
        let mut member = Member { size_bytes, ..Member::new(b'0') };
        let mut pax = PaxBuilder::default();
        match segments {
            None => self.header(entry, text, &member, pax, report)?,
            Some(segments) => {
                let data_bytes: u64 = segments.iter().map(|segment| segment.len_bytes).sum();
                report.done.hole_bytes += size_bytes - data_bytes;
                let map = sparse_map(segments, size_bytes);
                member.size_bytes = map.len() as u64 + data_bytes;
                pax.add_number(b"GNU.sparse.major", 1);
                pax.add_number(b"GNU.sparse.minor", 0);
                pax.add(b"GNU.sparse.name", &shown(&self.path, false));
                pax.add_number(b"GNU.sparse.realsize", size_bytes);
                self.header(entry, text, &member, pax, report)?;
                self.write(&map)?;
            }
        }
        self.padding_bytes = member.size_bytes.wrapping_neg() % BLOCK_BYTES as u64;
        match content {
            Content::Whole(data) => {
                report.done.data_bytes += size_bytes;
                self.write(&data)?;
                self.pad()
            }
            Content::Empty => self.pad(),
            Content::Pieces { .. } => Ok(()),
        }
    }

    fn put_link(
        &mut self,
        place: Place,
        target: LinkTarget,
        text: &Text,
        report: &mut Report<'_>,
    ) -> Result<()> {
        self.locate(place, text);
        let LinkTarget::Identity(number) = target else {
            let why = "an archive's paths cannot be written to another archive";
            return Err(Error::refused(text.bytes(place.span()), why));
        };
        let Some(linked) = self.links.get_mut(&number) else {
            self.warn(report, WarningKind::NotInTar { what: "link to a socket" });
            return Ok(());
        };
        linked.names_left = linked.names_left.saturating_sub(1);
        let (target, metadata) = (linked.path.clone(), linked.metadata);
        if linked.names_left == 0 {
            self.links.remove(&number);
        }
        report.done.hard_links += 1;
        // Extended attributes, which may be long, came with the first name.
        let entry = Entry { place, metadata, xattrs: Vec::new() };
        let link = shown(&target, false);
        let member = Member { link: &link, ..Member::new(b'1') };
        self.header(&entry, text, &member, PaxBuilder::default(), report)
    }

    /// Writes the header of the file at hand, an extended one before it where needed.
    fn header(
        &mut self,
        entry: &Entry,
        text: &Text,
        member: &Member<'_>,
        mut pax: PaxBuilder,
        report: &mut Report<'_>,
    ) -> Result<()> {
        let metadata = &entry.metadata;
        let name = shown(&self.path, member.letter == b'5');
        let mut block: Block = [0; BLOCK_BYTES];
        let is_sparse = !pax.0.is_empty();
        if is_sparse {
            // A reader that does not know sparse files unpacks this beside the real name.
            put_text(&mut block[..100], b"./GNUSparseFile.0/file");
        } else if !put_name(&mut block, &name) || needs_charset(&name) {
            add_text(&mut pax, b"path", &name);
        }
        if !put_text(&mut block[157..257], member.link) || needs_charset(member.link) {
            add_text(&mut pax, b"linkpath", member.link);
        }
        put_number(&mut block[100..108], metadata.permissions.into());
        if !put_number(&mut block[108..116], metadata.uid.into()) {
            pax.add_number(b"uid", metadata.uid);
        }
        if !put_number(&mut block[116..124], metadata.gid.into()) {
            pax.add_number(b"gid", metadata.gid);
        }
        if !put_number(&mut block[124..136], member.size_bytes) {
            pax.add_number(b"size", member.size_bytes);
        }
        let seconds = u64::try_from(metadata.mtime.sec).ok();
        let fits = seconds.is_some_and(|sec| put_number(&mut block[136..148], sec));
        if !fits || metadata.mtime.nsec > 0 {
            pax.add(b"mtime", decimal_time(metadata.mtime).as_bytes());
        }
        if !fits {
            put_number(&mut block[136..148], 0);
        }
        block[156] = member.letter;
        block[257..265].copy_from_slice(b"ustar\x0000");
        put_number(&mut block[329..337], member.device.0.into());
        put_number(&mut block[337..345], member.device.1.into());
        add_xattrs(&mut pax, entry, text, report);
        if !pax.0.is_empty() {
            self.write_extension(&pax.0, &name)?;
        }
        self.write_header(&mut block)
    }

    fn write_extension(&mut self, records: &[u8], name: &[u8]) -> Result<()> {
        let mut block: Block = [0; BLOCK_BYTES];
        let base = name.strip_suffix(b"/").unwrap_or(name);
        let base = base.rsplit(|&b| b == b'/').next().unwrap_or(b"");
        let base = if base.is_ascii() { &base[..base.len().min(80)] } else { b"name" };
        put_text(&mut block[..100], &[b"./PaxHeaders/", base].concat());
        put_number(&mut block[100..108], 0o644);
        for field in [108..116, 116..124, 136..148, 329..337, 337..345] {
            put_number(&mut block[field], 0);
        }
        let fits = put_number(&mut block[124..136], records.len() as u64);
        assert!(fits, "a header's records are far below 8 GiB");
        block[156] = b'x';
        block[257..265].copy_from_slice(b"ustar\x0000");
        self.write_header(&mut block)?;
        self.write(records)?;
        self.padding_bytes = (records.len() as u64).wrapping_neg() % BLOCK_BYTES as u64;
        self.pad()
    }

    fn write_header(&mut self, block: &mut Block) -> Result<()> {
        let sum = format!("{:06o}\0 ", checksum(block));
        block[148..156].copy_from_slice(sum.as_bytes());
        self.write(block)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.written_bytes += bytes.len() as u64;
        self.output.write_all(bytes).map_err(|e| self.failed(e))
    }

    fn pad(&mut self) -> Result<()> {
        let zeros = [0; BLOCK_BYTES];
        let count = usize::try_from(std::mem::take(&mut self.padding_bytes)).unwrap_or(0);
        self.write(&zeros[..count])
    }

    /// Sets the path of the file at hand.
    fn locate(&mut self, place: Place, text: &Text) {
        self.path.clear();
        if let Place::Name(_) = place {
            self.path.extend_from_slice(&self.directory);
            if !self.path.is_empty() {
                self.path.push(b'/');
            }
        }
        self.path.extend_from_slice(text.bytes(place.span()));
    }

    fn remember(&mut self, identity: Option<Identity>, entry: &Entry) {
        if let Some(Identity { number, links }) = identity
            && links > 1
        {
            let (path, metadata) = (self.path.clone(), entry.metadata);
            self.links.insert(number, Linked { path, names_left: links - 1, metadata });
        }
    }

    fn failed(&self, error: io::Error) -> Error {
        Error::failed("write the archive, at", self.path.as_slice(), error)
    }

    fn warn(&self, report: &mut Report<'_>, what: WarningKind) {
        report.warn(&Warning { path: self.path.as_slice().into(), what });
    }
}

impl<W: Write> Sink for TarSink<W> {
    type Data = Vec<u8>;

    fn prepare(&self) -> Box<dyn Prepare<Vec<u8>>> {
        Box::new(Unprepared)
    }

    fn apply(&mut self, batch: Batch<Vec<u8>>, report: &mut Report<'_>) -> Result<()> {
        let Batch { steps, text, .. } = batch;
        steps.into_iter().try_for_each(|step| self.step(step, &text, report))
    }

    fn finish(&mut self, _: &mut Report<'_>) -> Result<()> {
        let zeros = [0; BLOCK_BYTES];
        self.path.clear();
        self.write(&zeros)?;
        self.write(&zeros)?;
        while !self.written_bytes.is_multiple_of(RECORD_BYTES) {
            self.write(&zeros)?;
        }
        self.output.flush().map_err(|e| self.failed(e))
    }
}

/// A path as the archive names it.
fn shown(path: &[u8], is_directory: bool) -> Vec<u8> {
    let mut name = b"./".to_vec();
    name.extend_from_slice(path);
    if is_directory && !path.is_empty() {
        name.push(b'/');
    }
    name
}

/// The map of version 1.0, filled to a block.
fn sparse_map(segments: &[Segment], size_bytes: u64) -> Vec<u8> {
    let last = segments.last().is_none_or(|last| last.end() < size_bytes);
    let tail = last.then_some(Segment { offset: size_bytes, len_bytes: 0 });
    let mut map = format!("{}\n", segments.len() + usize::from(last)).into_bytes();
    for segment in segments.iter().chain(&tail) {
        map.extend_from_slice(format!("{}\n{}\n", segment.offset, segment.len_bytes).as_bytes());
    }
    map.resize(map.len().next_multiple_of(BLOCK_BYTES), 0);
    map
}

/// Adds the extended attributes. `%` and `=` of a name are escaped as GNU tar does.
fn add_xattrs(pax: &mut PaxBuilder, entry: &Entry, text: &Text, report: &mut Report<'_>) {
    for xattr in &entry.xattrs {
        let (name, value) = (text.bytes(xattr.name), text.bytes(xattr.value));
        let acl_key: Option<&[u8]> = match name {
            b"system.posix_acl_access" => Some(b"SCHILY.acl.access"),
            b"system.posix_acl_default" => Some(b"SCHILY.acl.default"),
            _ => None,
        };
        if let (Some(key), Some(list)) = (acl_key, acl::to_text(value)) {
            pax.add(key, list.as_bytes());
        }
        let mut key = b"SCHILY.xattr.".to_vec();
        for &byte in name {
            match byte {
                b'%' => key.extend_from_slice(b"%25"),
                b'=' => key.extend_from_slice(b"%3D"),
                _ => key.push(byte),
            }
        }
        pax.add(&key, value);
        report.done.xattrs += 1;
    }
}

/// Adds a name. One that is not UTF-8 says that it is bytes.
fn add_text(pax: &mut PaxBuilder, key: &[u8], value: &[u8]) {
    if std::str::from_utf8(value).is_err() {
        pax.add(b"hdrcharset", b"BINARY");
    }
    pax.add(key, value);
}

/// Whether a plain header would leave open what the name's bytes mean. Bytes that are no text at
/// all are best taken as they are, as plain headers are.
fn needs_charset(name: &[u8]) -> bool {
    !name.is_ascii() && std::str::from_utf8(name).is_ok()
}

/// Puts a name into a plain header, split where it must be; `false` if it does not fit.
fn put_name(block: &mut Block, name: &[u8]) -> bool {
    const NAME_BYTES: usize = 100;
    const PREFIX_BYTES: usize = 155;
    if name.len() <= NAME_BYTES {
        return put_text(&mut block[..NAME_BYTES], name);
    }
    let from = name.len() - NAME_BYTES - 1;
    let split = name.iter().skip(from).position(|&b| b == b'/').map(|at| at + from);
    match split.filter(|&at| at <= PREFIX_BYTES && at + 1 < name.len()) {
        Some(at) => {
            put_text(&mut block[345..500], &name[..at]);
            put_text(&mut block[..NAME_BYTES], &name[at + 1..])
        }
        None => {
            put_text(&mut block[..NAME_BYTES], &name[..NAME_BYTES]);
            false
        }
    }
}

/// Puts as much of a text as fits; `false` if that is not all.
fn put_text(field: &mut [u8], text: &[u8]) -> bool {
    let len = text.len().min(field.len());
    field[..len].copy_from_slice(&text[..len]);
    len == text.len()
}

/// Puts a number as octal text with a NUL; `false`, and zero put, if it does not fit.
fn put_number(field: &mut [u8], value: u64) -> bool {
    let digits = field.len() - 1;
    let text = format!("{value:0digits$o}");
    let fits = text.len() == digits;
    let text = if fits { text } else { "0".repeat(digits) };
    field[..digits].copy_from_slice(text.as_bytes());
    fits
}

fn decimal_time(time: ubtrfs_rt::Time) -> String {
    let (sign, sec, nsec) = if time.sec < 0 && time.nsec > 0 {
        ("-", (time.sec + 1).unsigned_abs(), 1_000_000_000 - time.nsec)
    } else if time.sec < 0 {
        ("-", time.sec.unsigned_abs(), 0)
    } else {
        ("", time.sec.unsigned_abs(), time.nsec)
    };
    let text = format!("{sign}{sec}.{nsec:09}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}
