//! The `ubtrfs` command: arguments to engine calls, answers to a terminal or to JSON.
#![forbid(unsafe_code)]

mod call;
mod cli;
mod commands;
mod compress;
mod edit;
mod epoch;
mod facts;
mod failure;
mod image;
mod live;
mod mount_helper;
mod mount_words;
mod mounts;
mod output;
mod outside;
mod progress;
mod read_ahead;
mod signals;
mod signature;
mod size;
mod target;
mod unfinished;
mod walk;
mod whole;
mod words;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main()
}
