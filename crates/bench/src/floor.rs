//! A FUSE server that does nothing, as a process: what the protocol costs at least.

use std::ffi::OsString;
use std::io::Write as _;
use std::path::Path;

use crate::error::{Error, Result};

/// Serves the directory that the only argument names, until it is unmounted; prints `ready` when it can be used.
///
/// # Errors
/// Wrong arguments; what the system says.
pub fn main(arguments: &[OsString]) -> Result<()> {
    let [directory] = arguments else {
        return Err(Error::Input { what: "usage: floor DIR".to_owned() });
    };
    let say = || {
        // Whether anybody listens does not matter to those that it serves.
        let mut output = std::io::stdout();
        let _ = output.write_all(b"ready\n").and_then(|()| output.flush());
    };
    Ok(ubtrfs_fuse::floor::run(Path::new(directory), say)?)
}
