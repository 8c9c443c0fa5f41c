//! `ubtrfs help`: the help of a command, or of something that concerns several.

use crate::cli;
use crate::failure::{Exit, Failure, Result};
use crate::output::Output;

/// Print help for a command or a topic
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  ubtrfs help import
  ubtrfs help inspect super
  ubtrfs help exit-codes")]
pub struct Args {
    /// A command (and its subcommand), or a topic; `topics` lists them
    #[arg(value_name = "COMMAND|TOPIC")]
    words: Vec<String>,
}

/// A text that belongs to no single command.
pub struct Topic {
    /// Its name on the command line.
    pub name: &'static str,
    /// One line.
    pub about: &'static str,
    text: fn() -> String,
}

impl Topic {
    /// The whole text.
    pub fn text(&self) -> String {
        (self.text)()
    }
}

/// All topics.
pub const TOPICS: [Topic; 6] = [
    Topic { name: "exit-codes", about: "what the exit codes mean", text: exit_codes },
    Topic { name: "images", about: "what IMAGE can be, and what is done to it", text: images },
    Topic { name: "paths", about: "how paths inside an image are read", text: paths },
    Topic { name: "sizes", about: "how sizes are written", text: sizes },
    Topic { name: "json", about: "what --json prints", text: json },
    Topic { name: "reproducible", about: "the same image each time", text: reproducible },
];

/// Prints help.
pub fn run(args: &Args, out: &mut Output) -> Result<Exit> {
    let text = text_for(&args.words)?;
    out.text(&text)?;
    if !text.ends_with('\n') {
        out.text("\n")?;
    }
    Ok(Exit::Done)
}

fn text_for(words: &[String]) -> Result<String> {
    if let [word] = words {
        if word == "topics" {
            return Ok(list_of_topics());
        }
        if let Some(topic) = TOPICS.iter().find(|topic| topic.name == word) {
            return Ok(topic.text());
        }
    }
    let mut command = cli::definition_for_terminals();
    command.build();
    let mut at = &mut command;
    for word in words {
        at = at.find_subcommand_mut(word).ok_or_else(|| {
            Failure::usage("help", format!("no command or topic '{word}'"))
                .advice("`ubtrfs --help` lists the commands, `ubtrfs help topics` the topics.")
        })?;
    }
    Ok(at.render_help().to_string())
}

fn list_of_topics() -> String {
    let mut text = String::from("Topics, each for `ubtrfs help TOPIC`:\n");
    for topic in &TOPICS {
        text.push_str(&format!("  {:<13} {}\n", topic.name, topic.about));
    }
    text
}

fn exit_codes() -> String {
    let mut text = String::from("Exit codes of every command:\n");
    for (exit, meaning) in Exit::MEANINGS {
        text.push_str(&format!("  {}  {meaning}\n", exit.code()));
    }
    text.push_str(
        "\nWhere one call names several paths and some fail, the others are done and the highest\n\
         code is returned. Errors go to standard error, one each, as\n\
         \x20 ubtrfs: WHAT: WHERE: WHY\n\
         and, indented below, what to do. A reader that goes away (`ubtrfs cat … | head`) is no error.\n",
    );
    text
}

fn images() -> String {
    "\
IMAGE is an image file or a block device that you may read, and write where it is changed. No root
is needed for files that are yours.

A filesystem in a partition of a disk image is opened with --partition N (GPT or MBR), or with
--offset BYTES if you know where it begins. Further devices of the same filesystem are named with
--device FILE, once each; one that is gone is done without by --degraded, where copies allow.

An image is locked while it is open, and one that the kernel has mounted, through a loop device
too, is refused: two writers would destroy it. Reading commands open the image read-only and
change no byte of it. If the main superblock is damaged, --super-copy 1 (or 2) opens with a copy.
"
    .into()
}

fn paths() -> String {
    "\
A PATH inside an image is read from the root of its default subvolume, which is what a mount
shows; a leading slash makes no difference. --subvolid ID starts at another subvolume; 5 is the
top level, which holds all others. A path walks into subvolumes as into directories.

In the place of an image, the directory of a mount: paths begin at what it shows, the subvolume
that is mounted, or what `mount --bind` shows of it in another place.

Names are bytes. At a terminal they are quoted as `ls` quotes them; into a pipe or a file they
go as they are.
"
    .into()
}

fn sizes() -> String {
    "\
A size is a number of bytes, or a number with one of K M G T P E: powers of 1024, so that 1K is
1024 bytes and 16G is 17179869184. A B or iB behind the letter makes no difference (16GiB).
"
    .into()
}

fn json() -> String {
    "\
With --json a command prints one JSON value: an object, or an array with one element a line.
Sizes and addresses are bytes, as numbers; times are RFC 3339 in UTC with nanoseconds; modes are
octal strings such as \"0644\".

Names are bytes, JSON strings are not. A name that is UTF-8 is given as it is. Of any other, the
string has U+FFFD for what is not UTF-8, and a second member whose name ends in _hex gives all its
bytes in hexadecimal: {\"name\": \"caf\u{fffd}\", \"name_hex\": \"636166e9\"}.
"
    .into()
}

fn reproducible() -> String {
    "\
With the environment variable SOURCE_DATE_EPOCH set to seconds since 1970, mkfs, import and all
commands that change an image take that moment for every time they would take from the clock, and
draw identifiers from it and the options, or the image as it is, instead of at random. The same
input, options and SOURCE_DATE_EPOCH then give the same bytes, whatever the number of processors.
A mount does not heed it: what is written there goes by the clock. Commands at a mount take it for
the times of what they make and touch.

Two images made so from the same options have the same filesystem UUID; Linux does not mount two
of those at a time. Give each its own with -U.
"
    .into()
}
