//! The command line: what can be said, and who answers it.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use ubtrfs_fuse::Changed;

use crate::commands::change::Change;
use crate::commands::{self, change};
use crate::failure::{Exit, Failure, Result};
use crate::live;
use crate::mount_helper;
use crate::output::{Output, quote};

const ABOUT: &str = "btrfs in user space: make, fill, mount and read btrfs images";

const LONG_ABOUT: &str = "\
btrfs in user space. ubtrfs opens a btrfs filesystem that lies in an image file, in a partition of
one, or on block devices, and makes, fills, lists, reads, changes, checks and mounts it, with no
kernel driver for btrfs. What it writes, Linux mounts; what Linux writes, it opens.

IMAGE is an image file, a block device, or the directory where `ubtrfs mount` mounted one. A PATH inside it is written as from the root of the
mounted filesystem, with or without a leading slash.";

const EXAMPLES: &str = "\
Examples:
  ubtrfs import --mkfs disk.img photos/       make disk.img from a directory
  ubtrfs import --mkfs root.img root.tar.zst  ... or from a tar archive
  ubtrfs ls -l disk.img /                     list it
  ubtrfs cat disk.img /notes.txt              print a file
  ubtrfs put disk.img notes.txt /             bring in a file
  ubtrfs subvolume snapshot disk.img / /snap  make a snapshot
  ubtrfs export disk.img / backup.tar.zst     get everything out again
  ubtrfs mount disk.img /mnt                  use it as a directory

More:
  ubtrfs help COMMAND      what a command does and takes
  ubtrfs help exit-codes   what the exit codes mean
  ubtrfs help topics       everything else there is help on";

/// What stands on the command line.
#[derive(Parser)]
#[command(
    name = "ubtrfs",
    version,
    about = ABOUT,
    long_about = LONG_ABOUT,
    after_help = EXAMPLES,
    disable_help_subcommand = true,
    subcommand_required = true,
    arg_required_else_help = true,
    max_term_width = 100
)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Mkfs(commands::mkfs::Args),
    Import(Box<commands::import::Args>),
    Export(commands::export::Args),
    Mount(commands::mount::Args),
    Umount(commands::umount::Args),
    Ls(commands::ls::Args),
    Tree(commands::tree::Args),
    Cat(commands::cat::Args),
    Stat(commands::stat::Args),
    Df(commands::df::Args),
    Du(commands::du::Args),
    Put(change::put::Args),
    Get(commands::get::Args),
    Mkdir(change::mkdir::Args),
    Mknod(change::mknod::Args),
    Cp(change::cp::Args),
    Reflink(change::cp::ReflinkArgs),
    Mv(change::mv::Args),
    Rm(change::rm::Args),
    Ln(change::ln::Args),
    Chmod(change::chmod::Args),
    Chown(change::chown::Args),
    Touch(change::touch::Args),
    Truncate(change::truncate::Args),
    Getfattr(commands::getfattr::Args),
    Setfattr(change::setfattr::Args),
    Batch(change::batch::Args),
    Subvolume(commands::subvolume::Args),
    Property(change::property::Args),
    Filesystem(commands::filesystem::Args),
    Check(commands::check::Args),
    Inspect(commands::inspect::Args),
    Bench(commands::bench::Args),
    Help(commands::help::Args),
    #[command(hide = true)]
    Generate(commands::generate::Args),
}

impl Command {
    fn run(self, out: &mut Output) -> Result<Exit> {
        match self {
            Self::Mkfs(args) => commands::mkfs::run(&args, out),
            Self::Import(args) => commands::import::run(&args, out),
            Self::Export(args) => commands::export::run(&args, out),
            Self::Mount(args) => commands::mount::run(&args),
            Self::Umount(args) => commands::umount::run(&args),
            Self::Ls(args) => commands::ls::run(&args, out),
            Self::Tree(args) => commands::tree::run(&args, out),
            Self::Cat(args) => commands::cat::run(&args, out),
            Self::Stat(args) => commands::stat::run(&args, out),
            Self::Df(args) => commands::df::run(&args, out),
            Self::Du(args) => commands::du::run(&args, out),
            Self::Get(args) => commands::get::run(&args, out),
            Self::Getfattr(args) => commands::getfattr::run(&args, out),
            Self::Batch(args) => change::batch::run(&args, out),
            Self::Subvolume(args) => match args.change() {
                Some(change) => change::run(change, out),
                None => commands::subvolume::run(&args, out),
            },
            Self::Property(args) => match args.change() {
                Some(change) => change::run(change, out),
                None => change::property::run(&args, out),
            },
            Self::Filesystem(args) => match args.change() {
                Some(change) => change::run(change, out),
                None => commands::filesystem::run(&args, out),
            },
            Self::Check(args) => commands::check::run(&args, out),
            Self::Inspect(args) => commands::inspect::run(&args, out),
            Self::Bench(args) => commands::bench::run(&args),
            Self::Help(args) => commands::help::run(&args, out),
            Self::Generate(args) => commands::generate::run(&args, out),
            Self::Put(args) => change::run(&args, out),
            Self::Mkdir(args) => change::run(&args, out),
            Self::Mknod(args) => change::run(&args, out),
            Self::Cp(args) => change::run(&args, out),
            Self::Reflink(args) => change::run(&args, out),
            Self::Mv(args) => change::run(&args, out),
            Self::Rm(args) => change::run(&args, out),
            Self::Ln(args) => change::run(&args, out),
            Self::Chmod(args) => change::run(&args, out),
            Self::Chown(args) => change::run(&args, out),
            Self::Touch(args) => change::run(&args, out),
            Self::Truncate(args) => change::run(&args, out),
            Self::Setfattr(args) => change::run(&args, out),
        }
    }

    /// The change that is asked for, where the command is one.
    fn change(&self) -> Option<&dyn Change> {
        match self {
            Self::Put(args) => Some(args),
            Self::Mkdir(args) => Some(args),
            Self::Mknod(args) => Some(args),
            Self::Cp(args) => Some(args),
            Self::Reflink(args) => Some(args),
            Self::Mv(args) => Some(args),
            Self::Rm(args) => Some(args),
            Self::Ln(args) => Some(args),
            Self::Chmod(args) => Some(args),
            Self::Chown(args) => Some(args),
            Self::Touch(args) => Some(args),
            Self::Truncate(args) => Some(args),
            Self::Setfattr(args) => Some(args),
            Self::Subvolume(args) => args.change(),
            Self::Property(args) => args.change(),
            Self::Filesystem(args) => args.change(),
            _ => None,
        }
    }
}

/// Reads the lines of a batch.
pub struct Lines(clap::Command);

/// A line of a batch.
pub struct Line(Command);

impl Lines {
    /// By the definitions of the command line.
    pub fn new() -> Self {
        Self(definition())
    }

    /// Reads a command line that asks for a change.
    ///
    /// # Errors
    /// It cannot be meant so, or changes nothing.
    pub fn parse(&mut self, words: &[OsString]) -> Result<Line> {
        let parsed = self.0.try_get_matches_from_mut(words);
        let cli = parsed.and_then(|matches| Cli::from_arg_matches(&matches));
        let name = words.get(1).map(|word| word.as_encoded_bytes()).unwrap_or_default();
        match cli {
            Ok(cli) if cli.command.change().is_some() => Ok(Line(cli.command)),
            Ok(_) => {
                Err(Failure::usage("batch", "it is no command that changes an image").at_name(name))
            }
            Err(error) => {
                let text = error.render().to_string();
                let text = text.strip_prefix("error: ").unwrap_or(&text);
                let first = text.split("\n\n").next().unwrap_or_default();
                let first: Vec<&str> = first.split_whitespace().collect();
                Err(Failure::usage("batch", first.join(" ")).at_name(name))
            }
        }
    }
}

impl Line {
    /// The change.
    pub fn change(&self) -> &dyn Change {
        self.0.change().expect("only changes are read")
    }
}

/// The whole command: reads the process's arguments, does it, reports.
pub fn main() -> ExitCode {
    mount_helper::exit_code(run())
}

fn run() -> Exit {
    if let Err(failure) = mount_helper::hand_back() {
        failure.report();
        return failure.exit;
    }
    let Some(words) = mount_helper::arguments() else { return Exit::Done };
    let parsed = definition_for_terminals()
        .try_get_matches_from(words)
        .and_then(|matches| Cli::from_arg_matches(&matches));
    let cli = match parsed {
        Ok(cli) => cli,
        Err(error) => return report_usage(&error),
    };
    let mut out = Output::new();
    let result = cli.command.run(&mut out).and_then(|exit| {
        out.flush()?;
        Ok(exit.max(out.exit()))
    });
    let result = match result {
        // Nothing was done yet: the image is opened first.
        Err(failure) if failure.mounted().is_some() => {
            failure.mounted().map_or(Ok(Exit::Done), live::forward)
        }
        result => result,
    };
    match result {
        Ok(exit) => exit,
        Err(failure) => {
            // What was written before the failure comes first; a failure to write is the lesser one.
            let _ = out.flush();
            failure.report();
            failure.exit.max(out.exit())
        }
    }
}

/// A command for a mount.
pub struct MountCommand(Command);

/// Reads the words of a command that is to be done at a mount.
///
/// # Errors
/// It cannot be meant so, or cannot be done there.
pub fn parse_for_mount(words: Vec<OsString>) -> Result<MountCommand> {
    let parsed = definition().try_get_matches_from(words);
    let cli = parsed.and_then(|matches| Cli::from_arg_matches(&matches)).map_err(|error| {
        let text = error.render().to_string();
        Failure::usage("a command for a mount", text.strip_prefix("error: ").unwrap_or(&text))
    })?;
    match cli.command {
        Command::Reflink(_)
        | Command::Ls(_)
        | Command::Tree(_)
        | Command::Stat(_)
        | Command::Df(_)
        | Command::Du(_)
        | Command::Mkdir(_)
        | Command::Mknod(_)
        | Command::Chmod(_)
        | Command::Chown(_)
        | Command::Touch(_)
        | Command::Truncate(_)
        | Command::Getfattr(_)
        | Command::Setfattr(_)
        | Command::Subvolume(_)
        | Command::Property(_)
        | Command::Filesystem(_)
        | Command::Inspect(_) => Ok(MountCommand(cli.command)),
        // Among others those that can take a file away which the kernel has open.
        _ => Err(Failure::new(
            Exit::Unsupported,
            "a mounted filesystem",
            "this command takes an image that is not mounted",
        )
        .advice("Unmount it first, or use cp, rm, tar and the like in the directory.")),
    }
}

impl MountCommand {
    /// What it changes that the kernel may have been told of; nothing where it only shows.
    pub fn changes_of_mount(&self) -> Option<Changed> {
        self.0.change().map(|_| match self.0 {
            Command::Subvolume(_) | Command::Property(_) | Command::Filesystem(_) => Changed::Names,
            _ => Changed::Anything,
        })
    }

    /// Whether it makes all durable.
    pub fn is_sync(&self) -> bool {
        matches!(&self.0, Command::Filesystem(args) if args.is_sync())
    }

    /// Whether it is about what files have in them, of which the kernel may hold some back.
    pub fn needs_data(&self) -> bool {
        let takes_snapshot = matches!(&self.0, Command::Subvolume(args) if args.takes_snapshot());
        // Nothing can be brought to a subvolume that has become read-only.
        let closes = matches!(&self.0, Command::Property(_)) && self.changes_of_mount().is_some();
        takes_snapshot
            || closes
            || self.is_sync()
            || self.changes_of_mount() == Some(Changed::Anything)
    }

    /// Does it.
    pub fn run(self, out: &mut Output) -> Result<Exit> {
        self.0.run(out)
    }
}

/// The tree of commands, for man pages and completions.
pub fn definition() -> clap::Command {
    Cli::command()
}

/// The same for help at a terminal: one compact form, whether by `-h`, `--help` or `help`, that
/// begins with the whole description.
pub fn definition_for_terminals() -> clap::Command {
    compact(definition())
}

fn compact(mut command: clap::Command) -> clap::Command {
    let children: Vec<String> =
        command.get_subcommands().map(|child| child.get_name().to_owned()).collect();
    for child in children {
        command = command.mut_subcommand(child, compact);
    }
    let about = command.get_long_about().or(command.get_about()).map(ToString::to_string);
    command
        .help_template(format!(
            "{}\n\n{{usage-heading}} {{usage}}\n\n{{all-args}}{{after-help}}",
            about.unwrap_or_default()
        ))
        .long_about(None::<&str>)
}

/// Prints what clap has to say: help and versions on stdout, errors as ours on stderr.
fn report_usage(error: &clap::Error) -> Exit {
    let text = error.render();
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            let mut out = Output::new();
            let written = out.text(&text.to_string()).and_then(|()| out.flush());
            written.map_or_else(
                |failure| {
                    failure.report();
                    failure.exit
                },
                |()| Exit::Done,
            )
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            eprint!("{text}");
            Exit::Usage
        }
        ErrorKind::InvalidSubcommand => {
            no_such_command(error).report();
            Exit::Usage
        }
        _ => {
            let text = text.to_string();
            eprint!("ubtrfs: {}", text.strip_prefix("error: ").unwrap_or(&text));
            Exit::Usage
        }
    }
}

/// A command of another version, or a slip of the finger.
fn no_such_command(error: &clap::Error) -> Failure {
    let word = match error.get(ContextKind::InvalidSubcommand) {
        Some(ContextValue::String(word)) => quote::for_message(word.as_bytes()),
        _ => "?".to_owned(),
    };
    let similar = match error.get(ContextKind::SuggestedSubcommand) {
        Some(ContextValue::Strings(words)) => words.as_slice(),
        _ => &[],
    };
    let mut advice = String::new();
    if !similar.is_empty() {
        advice = format!("Did you mean {}? ", similar.join(" or "));
    }
    advice.push_str("`ubtrfs --help` lists the commands there are.");
    Failure::usage(word, "this version has no such command").advice(advice)
}
