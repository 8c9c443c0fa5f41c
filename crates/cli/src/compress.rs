//! How data is to be compressed, on the command line.

use ubtrfs_engine::Method;
use ubtrfs_ondisk::file_extent::Compression;

/// A method, or none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Compress(pub Option<Method>);

/// Reads `METHOD[:LEVEL]`.
///
/// # Errors
/// There is no such method or level.
pub fn parse(text: &str) -> Result<Compress, String> {
    let (name, level) = match text.split_once(':') {
        Some((name, level)) => (name, Some(level)),
        None => (text, None),
    };
    let (compression, levels) = match name {
        "none" | "no" => return Ok(Compress(None)),
        "zlib" => (Compression::Zlib, 1..=9),
        "lzo" => (Compression::Lzo, 0..=0),
        "zstd" => (Compression::Zstd, -15..=15),
        _ => return Err("zlib, lzo and zstd are known".into()),
    };
    let Some(level) = level else {
        return Ok(Compress(Some(Method::with_default_level(compression))));
    };
    match level.parse::<i32>() {
        Ok(level) if levels.contains(&level) && level != 0 => {
            Ok(Compress(Some(Method::new(compression, level))))
        }
        _ if compression == Compression::Lzo => Err("lzo has no levels".into()),
        _ => Err(format!("{name} has the levels {} to {}", levels.start(), levels.end())),
    }
}
