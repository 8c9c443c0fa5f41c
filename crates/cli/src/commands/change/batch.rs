//! `ubtrfs batch`: several changes as one.

use std::ffi::OsString;
use std::io::{self, IsTerminal, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use ubtrfs_engine::Filesystem;
use ubtrfs_ondisk::DeviceId;
use ubtrfs_rt::Arc;
use ubtrfs_volume::Device;

use super::commit;
use crate::cli::{Line, Lines};
use crate::edit::{Edit, OnFailure};
use crate::failure::{Exit, Failure, Result};
use crate::image::ChangedImageArgs;
use crate::output::Output;
use crate::words;

/// Make several changes to an image, all or none
///
/// Reads commands from standard input, one a line: those of ubtrfs that change an image, without ubtrfs
/// in front and without IMAGE. They become durable together. If a line fails, nothing is changed, and
/// the message names the line.
///
/// Words are separated by blanks, and quoted as for a shell: 'as it is', "with \\ \" \$ and \`
/// escaped", $'with \n, \t and octal \351', and \ before a single character. A # where a word would
/// begin starts a comment. Nothing is expanded: no variables, no patterns.
///
/// All is held in memory until the end, at most three quarters of --cache [default: 2G]. A batch
/// that grows larger, or needs more space than there is before anything is committed, is refused as
/// a whole.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    // Its cache has a default of its own: `image::CACHE_BYTES_OF_ONE_TRANSACTION`.
    mut_arg("cache", |cache| cache.help("Memory for tree blocks and file data [default: 2G]")),
    after_help = "\
Examples:
  ubtrfs batch disk.img < changes.txt
  printf '%s\\n' 'mkdir -p /srv/www' 'put index.html /srv/www' 'chown -R 33:33 /srv/www' |
    ubtrfs batch disk.img"
)]
pub struct Args {
    #[command(flatten)]
    image: ChangedImageArgs,
    /// Read the commands from this file, not from standard input
    #[arg(short, long, value_name = "FILE")]
    file: Option<std::path::PathBuf>,
}

/// Bytes of commands that are read at most.
const INPUT_BYTES_MAX: u64 = 256 << 20;

/// Makes them.
pub fn run(args: &Args, out: &mut Output) -> Result<Exit> {
    let text = args.input()?;
    // What is wrong with the words of a line is told before anything is opened.
    let mut parser = Lines::new();
    let mut lines = Vec::new();
    for (number, line) in (1..).zip(text.split(|byte| *byte == b'\n')) {
        let command = parse(&mut parser, line).map_err(|failure| failure.in_line(number))?;
        lines.extend(command.map(|command| (number, command)));
    }
    let image = args.image.write_at_once()?;
    let held = image.filesystem().hold_commits();
    let edit = Edit::new(&image, OnFailure::Stop);
    let lengths = Lengths::of(image.filesystem());
    for (number, command) in &lines {
        command.change().apply(&edit, out).map_err(|failure| {
            lengths.restore();
            failure.in_line(*number).advice_also("Nothing was changed.")
        })?;
    }
    drop(held);
    commit(&image)?;
    for (_, command) in &lines {
        command.change().finish(&image)?;
    }
    Ok(Exit::Done)
}

/// How long each device is. A filesystem that is made larger makes its image file longer at once.
struct Lengths(Vec<(Arc<dyn Device>, u64)>);

impl Lengths {
    fn of(filesystem: &Filesystem) -> Self {
        let volume = filesystem.volume();
        let devids = volume.device_items().into_iter().map(|item| DeviceId(item.devid.get()));
        let devices = devids.filter_map(|devid| volume.device(devid));
        Self(devices.map(|device| (Arc::clone(&device), device.len_bytes())).collect())
    }

    /// Cuts off what came to be there, which nothing that is durable reaches.
    fn restore(&self) {
        for (device, len_bytes) in &self.0 {
            if device.len_bytes() > *len_bytes {
                // The failure that brought us here is what is reported; a longer file is no harm.
                let _ = device.resize(*len_bytes);
            }
        }
    }
}

impl Args {
    fn input(&self) -> Result<Vec<u8>> {
        let mut text = Vec::new();
        let read = match &self.file {
            Some(path) => std::fs::File::open(path)
                .and_then(|file| file.take(INPUT_BYTES_MAX + 1).read_to_end(&mut text))
                .map_err(|error| Failure::io("reading", &error).at_path(path)),
            None if io::stdin().is_terminal() => {
                eprintln!("Commands, one a line; the end of input (Ctrl-D) makes the changes:");
                from_stdin(&mut text)
            }
            None => from_stdin(&mut text),
        };
        if read? as u64 > INPUT_BYTES_MAX {
            return Err(Failure::usage("batch", "more than 256M of commands"));
        }
        Ok(text)
    }
}

fn from_stdin(text: &mut Vec<u8>) -> Result<usize> {
    io::stdin()
        .lock()
        .take(INPUT_BYTES_MAX + 1)
        .read_to_end(text)
        .map_err(|error| Failure::io("reading", &error).at("standard input"))
}

/// The command of one line; none where it is empty.
fn parse(parser: &mut Lines, line: &[u8]) -> Result<Option<Line>> {
    let words = words::split(line).map_err(|why| Failure::usage("batch", why))?;
    let mut words = words.into_iter().map(OsString::from_vec);
    let Some(name) = words.next() else { return Ok(None) };
    let mut arguments = vec![OsString::from("ubtrfs"), name];
    if arguments[1] == "subvolume" || arguments[1] == "property" || arguments[1] == "filesystem" {
        arguments.extend(words.next());
    }
    // A word that no file name is: the image is the batch's.
    arguments.push(OsString::from(PLACEHOLDER));
    arguments.extend(words);
    let command = parser.parse(&arguments)?;
    if command.change().image().has_options() {
        return Err(Failure::usage("batch", "options of the image stand before the batch")
            .at_name(arguments[1].as_bytes()));
    }
    Ok(Some(command))
}

/// Stands where IMAGE would.
const PLACEHOLDER: &str = "IMAGE";
