//! The commands, one file each.

pub mod cat;
pub mod df;
pub mod du;
pub mod export;
pub mod generate;
pub mod help;
pub mod import;
pub mod inspect;
pub mod ls;
pub mod mkfs;
pub mod stat;
pub mod subvolume;
pub mod tree;
