//! Mounts by the command, one at a time. One program, as each is linked for itself.

#[path = "../support/fates.rs"]
mod fates;
#[path = "../support/place.rs"]
mod place;

mod mount_as_linux;
mod mount_asked;
mod mount_clones;
mod mount_commands;
mod mount_deleted;
mod mount_direct;
mod mount_ends;
mod mount_exclusion;
mod mount_fstab;
mod mount_helpers;
mod mount_limits;
mod mount_options;
mod mount_places;
mod mount_promises;
mod mount_reach;
mod mount_refusals;
mod mount_serving;
mod mount_small_calls;
mod mount_unmounting;
mod mount_written_anew;
