//! Compression of archives: found by magic when read, by name when written.
//!
//! Memory of the decoders is bounded: an xz or zstd stream that asks for more is refused.

use std::io::{self, BufRead, BufReader, Cursor, Read, Write};
use std::num::NonZeroU32;
use std::sync::mpsc::{Receiver, sync_channel};

use bzip2::bufread::BzDecoder;
use flate2::bufread::GzDecoder;
use flate2::write::GzEncoder;
use liblzma::stream::{Action, Check, MtStreamBuilder, Status, Stream};
use liblzma::write::XzEncoder;
use ubtrfs_rt::Executor;

/// Bytes read at once from a compressed input.
const INPUT_BUFFER_BYTES: usize = 256 << 10;

/// Bytes of a decompressed chunk between two threads, and how many of them.
const CHUNK_BYTES: usize = 512 << 10;
const CHUNKS_AHEAD: usize = 4;

/// An xz stream whose decoder needs more is refused; `xz -9` needs 65 MiB.
const XZ_MEMORY_BYTES_MAX: u64 = 512 << 20;

/// How an archive is compressed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Compression {
    /// Not at all.
    #[default]
    None,
    /// gzip, level 6.
    Gzip,
    /// xz, level 6.
    Xz,
    /// zstd, level 3.
    Zstd,
    /// bzip2, level 9.
    Bzip2,
}

impl Compression {
    /// Bytes that [`Compression::of_magic`] looks at.
    pub const MAGIC_BYTES: usize = 6;

    /// What a file that begins so is compressed with.
    pub fn of_magic(start: &[u8]) -> Self {
        const MAGIC: [(&[u8], Compression); 3] = [
            (&[0x1f, 0x8b], Compression::Gzip),
            (&[0xfd, b'7', b'z', b'X', b'Z', 0], Compression::Xz),
            (&[0x28, 0xb5, 0x2f, 0xfd], Compression::Zstd),
        ];
        // Also the name of a first member may begin with those three letters: a level follows, and how a block begins, or the end.
        if let [b'B', b'Z', b'h', b'1'..=b'9', rest @ ..] = start
            && (rest.starts_with(b"\x31\x41") || rest.starts_with(b"\x17\x72"))
        {
            return Self::Bzip2;
        }
        MAGIC.iter().find(|(magic, _)| start.starts_with(magic)).map_or(Self::None, |m| m.1)
    }

    /// What a file of that name is to be compressed with; `None` if the name is no archive's.
    pub fn of_name(name: &[u8]) -> Option<Self> {
        const ENDINGS: [(&[u8], Compression); 11] = [
            (b".tar", Compression::None),
            (b".tar.gz", Compression::Gzip),
            (b".tgz", Compression::Gzip),
            (b".tar.xz", Compression::Xz),
            (b".txz", Compression::Xz),
            (b".tar.zst", Compression::Zstd),
            (b".tzst", Compression::Zstd),
            (b".tar.zstd", Compression::Zstd),
            (b".tar.bz2", Compression::Bzip2),
            (b".tbz2", Compression::Bzip2),
            (b".tbz", Compression::Bzip2),
        ];
        let name = name.to_ascii_lowercase();
        ENDINGS.iter().find(|(ending, _)| name.ends_with(ending)).map(|(_, found)| *found)
    }
}

/// Whether a file of that name would be taken for an archive, of a kind that is not written here: who
/// gives it does not mean a directory.
pub fn is_name_of_another_archive(name: &[u8]) -> bool {
    const ENDINGS: [&[u8]; 9] =
        [b".taz", b".tlz", b".tz2", b".zip", b".cpio", b".7z", b".rar", b".squashfs", b".iso"];
    let name = name.to_ascii_lowercase();
    let last = name.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    Compression::of_name(&name).is_none()
        && (last.windows(5).any(|part| part == b".tar.")
            || ENDINGS.iter().any(|ending| last.ends_with(ending)))
}

/// Reads `input` decompressed, whatever compressed it, on a thread of its own if there may be one.
///
/// # Errors
/// The input cannot be read or no decoder made.
pub fn decoder(
    mut input: Box<dyn Read + Send>,
    executor: Executor,
) -> io::Result<Box<dyn Read + Send>> {
    let mut start = Vec::with_capacity(Compression::MAGIC_BYTES);
    input.by_ref().take(Compression::MAGIC_BYTES as u64).read_to_end(&mut start)?;
    let compression = Compression::of_magic(&start);
    let input = BufReader::with_capacity(INPUT_BUFFER_BYTES, Cursor::new(start).chain(input));
    let decoder: Box<dyn Read + Send> = match compression {
        Compression::None => return Ok(Box::new(input)),
        Compression::Gzip => Box::new(Streams::new(input, GzDecoder::new, GzDecoder::into_inner)),
        Compression::Xz => Box::new(XzStreams::new(input, executor)),
        Compression::Zstd => Box::new(zstd::Decoder::with_buffer(input)?),
        Compression::Bzip2 => Box::new(Streams::new(input, BzDecoder::new, BzDecoder::into_inner)),
    };
    match executor {
        Executor::Inline => Ok(Box::new(BufReader::with_capacity(CHUNK_BYTES, decoder))),
        Executor::Threads(_) => Ok(Box::new(ReadAhead::spawn(decoder)?)),
    }
}

/// One stream after another, each decoded by a `D`. Zeros may fill up what is behind the last, as of what was on a tape; gzip(1) passes over
/// them, too.
struct Streams<D, R> {
    /// `None` at the end of all.
    stream: Option<D>,
    begin: fn(R) -> D,
    end: fn(D) -> R,
}

impl<D, R> Streams<D, R> {
    fn new(input: R, begin: fn(R) -> D, end: fn(D) -> R) -> Self {
        Self { stream: Some(begin(input)), begin, end }
    }
}

/// Passes over zeros. Returns whether something else follows.
fn skip_zeros(input: &mut impl BufRead) -> io::Result<bool> {
    loop {
        let bytes = match input.fill_buf() {
            // Who is told so reads again, and would find the end.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            bytes => bytes?,
        };
        if bytes.is_empty() {
            return Ok(false);
        }
        let zeros = bytes.iter().take_while(|&&byte| byte == 0).count();
        let has_more = zeros < bytes.len();
        input.consume(zeros);
        if has_more {
            return Ok(true);
        }
    }
}

impl<D: Read, R: BufRead> Read for Streams<D, R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        while !buf.is_empty()
            && let Some(mut stream) = self.stream.take()
        {
            let result = stream.read(buf);
            if !matches!(result, Ok(0)) {
                self.stream = Some(stream);
                return result;
            }
            let mut input = (self.end)(stream);
            if skip_zeros(&mut input)? {
                self.stream = Some((self.begin)(input));
            }
        }
        Ok(0)
    }
}

/// One xz stream after another, each decoded by several threads where its blocks tell their sizes.
struct XzStreams<R> {
    input: R,
    threads: u32,
    stream: Option<Stream>,
    is_first: bool,
}

impl<R: BufRead> XzStreams<R> {
    fn new(input: R, executor: Executor) -> Self {
        let threads = u32::try_from(executor.thread_count()).unwrap_or(1).max(1);
        Self { input, threads, stream: None, is_first: true }
    }

    /// Begins the next stream; `false` at the end of the input.
    fn next_stream(&mut self) -> io::Result<bool> {
        // Zeros may pad the space between streams.
        let has_more = match self.is_first {
            true => !self.input.fill_buf()?.is_empty(),
            false => skip_zeros(&mut self.input)?,
        };
        if !has_more {
            return Ok(false);
        }
        self.is_first = false;
        let stream = MtStreamBuilder::new()
            .threads(self.threads)
            .memlimit_threading(XZ_MEMORY_BYTES_MAX)
            .memlimit_stop(XZ_MEMORY_BYTES_MAX)
            .decoder()?;
        self.stream = Some(stream);
        Ok(true)
    }
}

impl<R: BufRead> Read for XzStreams<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        while !buf.is_empty() {
            let Some(stream) = &mut self.stream else {
                if self.next_stream()? {
                    continue;
                }
                return Ok(0);
            };
            let input = self.input.fill_buf()?;
            let at_end = input.is_empty();
            let action = if at_end { Action::Finish } else { Action::Run };
            let (before_in, before_out) = (stream.total_in(), stream.total_out());
            let status = stream.process(input, buf, action)?;
            let consumed =
                usize::try_from(stream.total_in() - before_in).expect("no more than the buffer");
            let made =
                usize::try_from(stream.total_out() - before_out).expect("no more than the buffer");
            self.input.consume(consumed);
            match status {
                Status::StreamEnd => self.stream = None,
                Status::MemNeeded if at_end && made == 0 => {
                    return Err(io::Error::new(
                        io::ErrorKind::UnexpectedEof,
                        "the xz stream ends too early",
                    ));
                }
                _ => {}
            }
            if made > 0 {
                return Ok(made);
            }
        }
        Ok(0)
    }
}

/// What another thread decompresses ahead.
struct ReadAhead {
    chunks: Receiver<io::Result<Vec<u8>>>,
    current: Cursor<Vec<u8>>,
    ended: bool,
}

impl ReadAhead {
    fn spawn(mut decoder: Box<dyn Read + Send>) -> io::Result<Self> {
        let (sender, chunks) = sync_channel(CHUNKS_AHEAD);
        std::thread::Builder::new().name("decompress".into()).spawn(move || {
            loop {
                let mut chunk = Vec::with_capacity(CHUNK_BYTES);
                let result = decoder.by_ref().take(CHUNK_BYTES as u64).read_to_end(&mut chunk);
                let is_last = chunk.len() < CHUNK_BYTES;
                // What was decompressed before an error comes first: it belongs to members that
                // the archive has whole.
                if (!chunk.is_empty() && sender.send(Ok(chunk)).is_err()) || is_last {
                    if let Err(error) = result {
                        // Nobody may be listening any more.
                        let _ = sender.send(Err(error));
                    }
                    return;
                }
            }
        })?;
        Ok(Self { chunks, current: Cursor::new(Vec::new()), ended: false })
    }
}

impl Read for ReadAhead {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        loop {
            let count = self.current.read(buf)?;
            if count > 0 || buf.is_empty() || self.ended {
                return Ok(count);
            }
            match self.chunks.recv() {
                Ok(chunk) => {
                    self.ended = chunk.is_err();
                    self.current = Cursor::new(chunk?);
                }
                Err(_) => self.ended = true,
            }
        }
    }
}

/// Compresses what is written to it.
pub struct Encoder<W: Write>(Kind<W>);

enum Kind<W: Write> {
    None(W),
    Gzip(GzEncoder<W>),
    Xz(XzEncoder<W>),
    Zstd(zstd::Encoder<'static, W>),
    Bzip2(bzip2::write::BzEncoder<W>),
}

impl<W: Write> Encoder<W> {
    /// Compresses into `output`. The result does not depend on the number of threads.
    ///
    /// # Errors
    /// The encoder cannot be made.
    pub fn new(output: W, compression: Compression, executor: Executor) -> io::Result<Self> {
        let threads = NonZeroU32::new(u32::try_from(executor.thread_count()).unwrap_or(1))
            .unwrap_or(NonZeroU32::MIN);
        Ok(Self(match compression {
            Compression::None => Kind::None(output),
            Compression::Gzip => Kind::Gzip(GzEncoder::new(output, flate2::Compression::new(6))),
            Compression::Xz => {
                let stream = MtStreamBuilder::new()
                    .threads(threads.get())
                    .preset(6)
                    .check(Check::Crc64)
                    .encoder()?;
                Kind::Xz(XzEncoder::new_stream(output, stream))
            }
            Compression::Zstd => {
                let mut encoder = zstd::Encoder::new(output, 3)?;
                encoder.include_checksum(true)?;
                encoder.multithread(threads.get())?;
                Kind::Zstd(encoder)
            }
            Compression::Bzip2 => {
                Kind::Bzip2(bzip2::write::BzEncoder::new(output, bzip2::Compression::best()))
            }
        }))
    }

    /// Writes what is left and gives the output back.
    ///
    /// # Errors
    /// As the output reports.
    pub fn finish(self) -> io::Result<W> {
        let mut output = match self.0 {
            Kind::None(output) => output,
            Kind::Gzip(encoder) => encoder.finish()?,
            Kind::Xz(encoder) => encoder.finish()?,
            Kind::Zstd(mut encoder) => {
                // Where the input ends with a whole job, that job is marked as the last, or an empty
                // block comes after it, as it happened to be begun before the end was known or not.
                // After a flush the empty block always comes.
                encoder.flush()?;
                encoder.finish()?
            }
            Kind::Bzip2(encoder) => encoder.finish()?,
        };
        output.flush()?;
        Ok(output)
    }
}

impl<W: Write> Write for Encoder<W> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        match &mut self.0 {
            Kind::None(output) => output.write(buf),
            Kind::Gzip(encoder) => encoder.write(buf),
            Kind::Xz(encoder) => encoder.write(buf),
            Kind::Zstd(encoder) => encoder.write(buf),
            Kind::Bzip2(encoder) => encoder.write(buf),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match &mut self.0 {
            Kind::None(output) => output.flush(),
            Kind::Gzip(encoder) => encoder.flush(),
            Kind::Xz(encoder) => encoder.flush(),
            Kind::Zstd(encoder) => encoder.flush(),
            Kind::Bzip2(encoder) => encoder.flush(),
        }
    }
}

impl<W: Write> std::fmt::Debug for Encoder<W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Encoder")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Compression; 5] = [
        Compression::None,
        Compression::Gzip,
        Compression::Xz,
        Compression::Zstd,
        Compression::Bzip2,
    ];

    fn compressed(bytes: &[u8], compression: Compression, executor: Executor) -> Vec<u8> {
        let mut encoder = Encoder::new(Vec::new(), compression, executor).unwrap();
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn text() -> Vec<u8> {
        (0..400_000_u32).flat_map(|i| (i / 7).to_le_bytes()).collect()
    }

    #[test]
    fn codec_round_trip_found_by_magic() {
        for compression in ALL {
            for executor in [Executor::Inline, Executor::Threads(2)] {
                let packed = compressed(&text(), compression, executor);
                assert_eq!(Compression::of_magic(&packed), compression);
                let mut back = Vec::new();
                let input = Box::new(Cursor::new(packed));
                decoder(input, executor).unwrap().read_to_end(&mut back).unwrap();
                assert!(back == text(), "{compression:?}");
            }
        }
    }

    /// Input that ended with a whole job of zstd's (8 MiB) came out in one of two ways, as the
    /// threads happened to run.
    #[test]
    fn encoder_number_of_threads_same_bytes() {
        let big: Vec<u8> = text().iter().copied().cycle().take(40 << 20).collect();
        for compression in [Compression::Xz, Compression::Zstd] {
            let one = compressed(&big, compression, Executor::Inline);
            assert!(one == compressed(&big, compression, Executor::Threads(3)), "{compression:?}");
        }
    }

    #[test]
    fn decoder_two_streams_both_read() {
        for compression in &ALL[1..] {
            let mut packed = compressed(b"one", *compression, Executor::Inline);
            packed.extend(compressed(b"two", *compression, Executor::Inline));
            let mut back = Vec::new();
            let input = Box::new(Cursor::new(packed));
            decoder(input, Executor::Threads(2)).unwrap().read_to_end(&mut back).unwrap();
            assert_eq!(back, b"onetwo", "{compression:?}");
        }
    }

    /// What came from a tape, where blocks have one length, was refused.
    #[test]
    fn decoder_zeros_behind_the_last_stream_passed_over_and_nothing_else() {
        for compression in [Compression::Gzip, Compression::Xz, Compression::Bzip2] {
            let packed = compressed(b"one", compression, Executor::Inline);
            for (behind, is_read) in [(&[0; 10_004][..], true), (&[0, 0, 0, 0, 7][..], false)] {
                let input = Box::new(Cursor::new([&packed, behind].concat()));
                let mut back = Vec::new();
                let result = decoder(input, Executor::Inline).unwrap().read_to_end(&mut back);
                assert_eq!(result.is_ok(), is_read, "{compression:?}");
                assert_eq!(back, b"one", "{compression:?}");
            }
        }
    }

    /// An archive whose first member's name began so was taken for compressed.
    #[test]
    fn name_that_begins_as_bzip2_does_is_none() {
        for (start, compression) in [
            (&b"BZhang/"[..], Compression::None),
            (b"BZh9.txt", Compression::None),
            (b"BZh9", Compression::None),
            (&compressed(b"", Compression::Bzip2, Executor::Inline), Compression::Bzip2),
            (&compressed(b"one", Compression::Bzip2, Executor::Inline), Compression::Bzip2),
        ] {
            assert_eq!(Compression::of_magic(&start[..start.len().min(6)]), compression);
        }
    }

    #[test]
    fn decoder_cut_input_errors_after_what_is_whole() {
        for compression in &ALL[1..] {
            let packed = compressed(&text(), *compression, Executor::Inline);
            let input = Box::new(Cursor::new(packed[..packed.len() - 20].to_vec()));
            let mut back = Vec::new();
            let result = decoder(input, Executor::Threads(1)).unwrap().read_to_end(&mut back);
            assert!(result.is_err(), "{compression:?}");
        }
    }
}
