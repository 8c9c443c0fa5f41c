//! JSON: names without loss, and arrays that are written as they are found.
//!
//! JSON strings are Unicode, names in a filesystem are bytes. A name that is UTF-8 is a string; of
//! any other, the string has U+FFFD in place of what is not, and a second member, its name ending
//! in `_hex`, gives all bytes in hexadecimal.

use serde::Serialize;

use super::Output;
use crate::failure::{Exit, Failure, Result};

/// The string form of bytes that should be text.
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The bytes in hexadecimal where [`text`] loses some.
pub fn hex_if_lossy(bytes: &[u8]) -> Option<String> {
    std::str::from_utf8(bytes).is_err().then(|| hex(bytes))
}

/// Bytes in hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// One value on one line, without a newline.
pub fn compact(value: &impl Serialize) -> Result<String> {
    serde_json::to_string(value).map_err(|error| encoding(&error))
}

/// Writes one value, indented, and a newline.
pub fn document(out: &mut Output, value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value).map_err(|error| encoding(&error))?;
    out.line(&text)
}

/// An array whose elements are written one a line as they come.
pub struct Array {
    empty: bool,
}

impl Array {
    /// Opens the array.
    pub fn begin(out: &mut Output) -> Result<Self> {
        out.text("[")?;
        Ok(Self { empty: true })
    }

    /// Writes one element.
    pub fn element(&mut self, out: &mut Output, value: &impl Serialize) -> Result<()> {
        out.text(if std::mem::take(&mut self.empty) { "\n" } else { ",\n" })?;
        out.text(&compact(value)?)
    }

    /// Closes the array.
    pub fn end(self, out: &mut Output) -> Result<()> {
        out.line(if self.empty { "]" } else { "\n]" })
    }
}

fn encoding(error: &serde_json::Error) -> Failure {
    Failure::new(Exit::Io, "writing JSON", error)
}
