//! `ubtrfs cat`: the contents of files.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use ubtrfs_ondisk::FileOffset;

use crate::failure::{Exit, Result};
use crate::image::{Image, ImageArgs};
use crate::output::Output;

/// Bytes read at a time.
const BUFFER_BYTES: usize = 1 << 20;

/// Print the contents of files in an image
///
/// The bytes go to standard output as they are, checked against their checksums; symbolic links are
/// followed inside the image.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  ubtrfs cat disk.img /etc/os-release
  ubtrfs cat disk.img /var/log/messages | grep error"
)]
pub struct Args {
    #[command(flatten)]
    image: ImageArgs,
    /// Files inside it
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<OsString>,
}

/// Prints.
pub fn run(args: &Args, out: &mut Output) -> Result<Exit> {
    let image = args.image.read()?;
    let mut buffer = vec![0; BUFFER_BYTES];
    for path in &args.paths {
        let result = file(&image, path.as_bytes(), &mut buffer, out);
        out.tolerate(result)?;
    }
    Ok(Exit::Done)
}

fn file(image: &Image, path: &[u8], buffer: &mut [u8], out: &mut Output) -> Result<()> {
    let failed = |error| image.failure("reading", path, error);
    let id = image.resolve_following(path)?;
    let mut file = image.filesystem().open_file(id).map_err(failed)?;
    let mut offset = 0;
    loop {
        let len = file.read(FileOffset(offset), buffer).map_err(failed)?;
        if len == 0 {
            return Ok(());
        }
        out.bytes(&buffer[..len])?;
        offset += len as u64;
    }
}
