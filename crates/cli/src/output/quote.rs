//! Names made safe to look at. A name in a filesystem is any bytes but `/` and NUL.
//!
//! At a terminal and in messages, names are quoted as `ls` does it (its shell-escape style): what
//! a shell reads back as the same bytes, and nothing that moves the cursor.

use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// A name for a terminal: as it is where that is harmless, else quoted for a shell.
pub fn for_terminal(name: &[u8]) -> String {
    match std::str::from_utf8(name) {
        Ok(text) if !text.is_empty() && !needs_quotes(text) => text.to_owned(),
        Ok(text) if !text.chars().any(char::is_control) => in_plain_quotes(text),
        _ => in_escaped_quotes(name),
    }
}

/// A name for a message: as [`for_terminal`], but spaces alone need no quotes.
pub fn for_message(name: &[u8]) -> String {
    match std::str::from_utf8(name) {
        Ok(text) if !text.is_empty() && !text.chars().any(char::is_control) => text.to_owned(),
        _ => for_terminal(name),
    }
}

/// A path of the host, for a message.
pub fn path(path: &Path) -> String {
    for_message(path.as_os_str().as_bytes())
}

fn needs_quotes(text: &str) -> bool {
    text.starts_with(['~', '#'])
        || text.chars().any(|c| c.is_control() || " \"'$&()*;<=>?[\\^`{|}!".contains(c))
}

fn in_plain_quotes(text: &str) -> String {
    if !text.contains('\'') {
        return format!("'{text}'");
    }
    if !text.contains(['"', '$', '`', '\\', '!']) {
        return format!("\"{text}\"");
    }
    format!("'{}'", text.replace('\'', "'\\''"))
}

/// Runs of harmless text in `'…'`, runs of other bytes in `$'…'`.
fn in_escaped_quotes(name: &[u8]) -> String {
    let mut out = String::from("'");
    let mut escaping = false;
    let mut switch = |out: &mut String, to: bool| {
        if escaping != to {
            out.push_str(if to { "'$'" } else { "''" });
            escaping = to;
        }
    };
    for chunk in name.utf8_chunks() {
        for c in chunk.valid().chars() {
            if c.is_control() {
                switch(&mut out, true);
                push_escape(&mut out, c);
            } else {
                switch(&mut out, false);
                if c == '\'' {
                    out.push_str("'\\''");
                } else {
                    out.push(c);
                }
            }
        }
        for byte in chunk.invalid() {
            switch(&mut out, true);
            push_octal(&mut out, *byte);
        }
    }
    out.push('\'');
    out
}

fn push_escape(out: &mut String, c: char) {
    match c {
        '\n' => out.push_str("\\n"),
        '\t' => out.push_str("\\t"),
        '\r' => out.push_str("\\r"),
        '\u{7}' => out.push_str("\\a"),
        '\u{8}' => out.push_str("\\b"),
        '\u{b}' => out.push_str("\\v"),
        '\u{c}' => out.push_str("\\f"),
        _ => {
            let mut buffer = [0; 4];
            for byte in c.encode_utf8(&mut buffer).bytes() {
                push_octal(out, byte);
            }
        }
    }
}

fn push_octal(out: &mut String, byte: u8) {
    // Writing to a string cannot fail.
    let _ = write!(out, "\\{byte:03o}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn for_terminal_quotes_as_ls_does() {
        for (name, text) in [
            (&b"plain.txt"[..], "plain.txt"),
            ("grüße".as_bytes(), "grüße"),
            (b"", "''"),
            (b"a b", "'a b'"),
            (b"it's", "\"it's\""),
            (b"it's $5", "'it'\\''s $5'"),
            (b"a\nb", "'a'$'\\n''b'"),
            (b"\x1b[31m", "''$'\\033''[31m'"),
            (b"caf\xe9", "'caf'$'\\351'"),
            (b"~root", "'~root'"),
        ] {
            assert_eq!(for_terminal(name), text);
        }
    }

    #[test]
    fn for_message_leaves_spaces_alone() {
        assert_eq!(for_message(b"my disk.img"), "my disk.img");
        assert_eq!(for_message(b"\x07"), "''$'\\a'");
    }
}
