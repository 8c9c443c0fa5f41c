//! Lines into words, as a shell quotes them, and nothing more.

/// The words of a line. None where it is empty or a comment.
///
/// # Errors
/// A quote that is not closed, or an escape that is none.
pub fn split(line: &[u8]) -> Result<Vec<Vec<u8>>, String> {
    let mut words = Vec::new();
    let mut word: Option<Vec<u8>> = None;
    let mut rest = line.iter().copied().peekable();
    while let Some(byte) = rest.next() {
        match byte {
            b' ' | b'\t' | b'\r' => words.extend(word.take()),
            b'#' if word.is_none() => break,
            b'\\' => {
                let escaped = rest.next().ok_or("a backslash at the end of the line")?;
                word.get_or_insert_default().push(escaped);
            }
            b'\'' => plain(&mut rest, word.get_or_insert_default())?,
            b'"' => quoted(&mut rest, word.get_or_insert_default())?,
            b'$' if rest.next_if_eq(&b'\'').is_some() => {
                escaped(&mut rest, word.get_or_insert_default())?;
            }
            other => word.get_or_insert_default().push(other),
        }
    }
    words.extend(word);
    Ok(words)
}

type Rest<'a> = std::iter::Peekable<std::iter::Copied<std::slice::Iter<'a, u8>>>;

/// Up to the next `'`, as it is.
fn plain(rest: &mut Rest<'_>, word: &mut Vec<u8>) -> Result<(), String> {
    loop {
        match rest.next() {
            Some(b'\'') => return Ok(()),
            Some(byte) => word.push(byte),
            None => return Err("a ' is not closed".into()),
        }
    }
}

/// Up to the next `"`; a backslash counts before what means something there.
fn quoted(rest: &mut Rest<'_>, word: &mut Vec<u8>) -> Result<(), String> {
    loop {
        match rest.next() {
            Some(b'"') => return Ok(()),
            Some(b'\\') => match rest.next_if(|byte| b"\\\"$`".contains(byte)) {
                Some(byte) => word.push(byte),
                None => word.push(b'\\'),
            },
            Some(byte) => word.push(byte),
            None => return Err("a \" is not closed".into()),
        }
    }
}

/// Up to the next `'`, with the escapes that names are printed with.
fn escaped(rest: &mut Rest<'_>, word: &mut Vec<u8>) -> Result<(), String> {
    loop {
        match rest.next() {
            Some(b'\'') => return Ok(()),
            Some(b'\\') => word.push(escape(rest)?),
            Some(byte) => word.push(byte),
            None => return Err("a $' is not closed".into()),
        }
    }
}

fn escape(rest: &mut Rest<'_>) -> Result<u8, String> {
    Ok(match rest.next() {
        Some(b'n') => b'\n',
        Some(b't') => b'\t',
        Some(b'r') => b'\r',
        Some(b'a') => 7,
        Some(b'b') => 8,
        Some(b'v') => 11,
        Some(b'f') => 12,
        Some(byte @ (b'\\' | b'\'' | b'"')) => byte,
        Some(digit @ b'0'..=b'7') => {
            let mut code = u32::from(digit - b'0');
            for _ in 0..2 {
                match rest.next_if(|next| (b'0'..=b'7').contains(next)) {
                    Some(next) => code = code * 8 + u32::from(next - b'0'),
                    None => break,
                }
            }
            u8::try_from(code).map_err(|_| "an octal escape goes to \\377")?
        }
        _ => return Err("an escape in $'…' is not known".into()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::quote;

    fn words(line: &str) -> Vec<String> {
        let words = split(line.as_bytes()).unwrap();
        words.into_iter().map(|word| String::from_utf8(word).unwrap()).collect()
    }

    #[test]
    fn split_reads_words_as_a_shell_does() {
        assert_eq!(words("mkdir  -p\t/a/b "), ["mkdir", "-p", "/a/b"]);
        assert_eq!(words("a 'b c' \"d \\\" e\" f\\ g"), ["a", "b c", "d \" e", "f g"]);
        assert_eq!(words("a'b'\"c\"d ''"), ["abcd", ""]);
        assert_eq!(words(r"$'a\tb\101\'' $x \$'y'"), ["a\tbA'", "$x", "$y"]);
        assert_eq!(words(r#""a\n\\""#), ["a\\n\\"]);
        assert_eq!(words("# all of it"), [""; 0]);
        assert_eq!(words("a#b #c"), ["a#b"]);
        assert_eq!(words(" \t\r"), [""; 0]);
    }

    #[test]
    fn split_open_quotes_and_bad_escapes_are_refused() {
        for line in ["'a", "\"a", "$'a", "a\\", "$'\\q'", "$'\\400'"] {
            assert!(split(line.as_bytes()).is_err(), "{line}");
        }
    }

    #[test]
    fn split_gives_back_any_name_that_is_printed_quoted() {
        for name in
            [&b"plain"[..], b"a b", b"it's $5", b"a\nb", b"caf\xe9\x01", b"\\", b"~root", b"#"]
        {
            let line = quote::for_terminal(name);
            assert_eq!(split(line.as_bytes()).unwrap(), [name], "{line}");
        }
    }
}
