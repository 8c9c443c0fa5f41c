//! The commands, one file each.

pub mod bench;
pub mod cat;
pub mod change;
pub mod check;
pub mod df;
pub mod du;
pub mod export;
pub mod filesystem;
pub mod generate;
pub mod get;
pub mod getfattr;
pub mod help;
pub mod import;
pub mod inspect;
pub mod ls;
pub mod mkfs;
pub mod mount;
pub mod stat;
pub mod subvolume;
pub mod tree;
pub mod umount;
