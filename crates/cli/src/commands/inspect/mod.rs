//! `ubtrfs inspect`: what lies on the medium, for those who look under the hood.

mod chunks;
mod delayed_refs;
mod fiemap;
mod free_space;
mod superblock;
mod tree;

use clap::Subcommand;

use crate::failure::{Exit, Result};
use crate::output::Output;

/// Show what lies on the medium: superblock, trees, chunks, extents of a file, free space
#[derive(clap::Args)]
#[command(arg_required_else_help = true)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    Super(superblock::Args),
    Tree(tree::Args),
    Chunks(chunks::Args),
    Fiemap(fiemap::Args),
    FreeSpace(free_space::Args),
    DelayedRefs(delayed_refs::Args),
}

/// Shows it.
pub fn run(args: &Args, out: &mut Output) -> Result<Exit> {
    match &args.what {
        What::Super(args) => superblock::run(args, out),
        What::Tree(args) => tree::run(args, out),
        What::Chunks(args) => chunks::run(args, out),
        What::Fiemap(args) => fiemap::run(args, out),
        What::FreeSpace(args) => free_space::run(args, out),
        What::DelayedRefs(args) => delayed_refs::run(args, out),
    }
}
