//! POSIX access control lists as archives write them and as the system stores them.
//!
//! Text: entries `tag:qualifier:permissions`, separated by commas or newlines, as in POSIX.1e;
//! archives of star and libarchive append `:id`. Stored form: that of
//! `linux/posix_acl_xattr.h`, version 2.

/// Version of the stored form.
const VERSION: u32 = 2;

/// Qualifier of entries that have none.
const UNDEFINED_ID: u32 = u32::MAX;

const USER_OBJ: u16 = 0x01;
const USER: u16 = 0x02;
const GROUP_OBJ: u16 = 0x04;
const GROUP: u16 = 0x08;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;

/// What a name in a list is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Named {
    /// A user.
    User,
    /// A group.
    Group,
}

/// The number of a user or group by the system's own files.
pub fn system_id(named: Named, name: &str) -> Option<u32> {
    let path = match named {
        Named::User => "/etc/passwd",
        Named::Group => "/etc/group",
    };
    let text = std::fs::read(path).ok()?;
    text.split(|&b| b == b'\n').find_map(|line| {
        let mut fields = line.split(|&b| b == b':');
        let id = (fields.next() == Some(name.as_bytes())).then(|| fields.nth(1)).flatten()?;
        std::str::from_utf8(id).ok()?.parse().ok()
    })
}

/// The stored form of a list in text form. `id` finds the numbers of names that come without.
///
/// # Errors
/// The entry that cannot be understood: malformed, or naming somebody unknown.
pub fn from_text(text: &[u8], id: &dyn Fn(Named, &str) -> Option<u32>) -> Result<Vec<u8>, String> {
    let text = std::str::from_utf8(text).map_err(|_| "it is not text".to_string())?;
    let mut entries = Vec::new();
    for entry in entry_texts(text) {
        let parsed = parse_entry(entry, id);
        entries.push(parsed.ok_or_else(|| format!("cannot understand {entry:?}"))?);
    }
    entries.sort_unstable();
    let mut stored = VERSION.to_le_bytes().to_vec();
    for (tag, id, permissions) in entries {
        stored.extend_from_slice(&tag.to_le_bytes());
        stored.extend_from_slice(&permissions.to_le_bytes());
        stored.extend_from_slice(&id.to_le_bytes());
    }
    Ok(stored)
}

/// What a list in text form lets the file's group do, whoever else it names: no more than its mask.
pub fn group_bits(text: &[u8]) -> Option<u32> {
    let text = std::str::from_utf8(text).ok()?;
    let (mut group, mut mask) = (None, 7);
    for (tag, _, bits) in entry_texts(text).filter_map(|entry| parse_entry(entry, &|_, _| None)) {
        match tag {
            GROUP_OBJ => group = Some(bits),
            MASK => mask = bits,
            _ => {}
        }
    }
    group.map(|bits| u32::from(bits & mask))
}

/// The entries of a list in text form, without what is said about them.
fn entry_texts(text: &str) -> impl Iterator<Item = &str> {
    let entries = text.split([',', '\n']).map(|entry| entry.split('#').next().unwrap_or("").trim());
    entries.filter(|entry| !entry.is_empty())
}

fn parse_entry(entry: &str, id_of: &dyn Fn(Named, &str) -> Option<u32>) -> Option<(u16, u32, u16)> {
    let mut fields = entry.split(':');
    let (tag, qualifier, permissions) = (fields.next()?, fields.next()?, fields.next()?);
    let id = match (qualifier, fields.next()) {
        ("", _) => None,
        (_, Some(id)) => Some(id.parse().ok()?),
        (name, None) => {
            let named = if tag.starts_with('u') { Named::User } else { Named::Group };
            Some(name.parse().ok().or_else(|| id_of(named, name))?)
        }
    };
    let tag = match (tag, id) {
        ("user" | "u", None) => USER_OBJ,
        ("user" | "u", Some(_)) => USER,
        ("group" | "g", None) => GROUP_OBJ,
        ("group" | "g", Some(_)) => GROUP,
        ("mask" | "m", None) => MASK,
        ("other" | "o", None) => OTHER,
        _ => return None,
    };
    let mut bits = 0;
    for c in permissions.chars() {
        bits |= match c {
            'r' => 4,
            'w' => 2,
            'x' => 1,
            '-' => 0,
            _ => return None,
        };
    }
    Some((tag, id.unwrap_or(UNDEFINED_ID), bits))
}

/// The text form, with numbers for users and groups; `None` if the stored form is malformed.
pub fn to_text(stored: &[u8]) -> Option<String> {
    let mut text = Vec::new();
    for (tag, bits, id) in entries(stored)? {
        let permissions: String = [(4, 'r'), (2, 'w'), (1, 'x')]
            .iter()
            .map(|&(bit, c)| if bits & bit != 0 { c } else { '-' })
            .collect();
        text.push(match tag {
            USER_OBJ => format!("user::{permissions}"),
            USER => format!("user:{id}:{permissions}"),
            GROUP_OBJ => format!("group::{permissions}"),
            GROUP => format!("group:{id}:{permissions}"),
            MASK => format!("mask::{permissions}"),
            OTHER => format!("other::{permissions}"),
            _ => return None,
        });
    }
    Some(text.join(","))
}

/// The permission bits of a file with that access list, as the kernel shows them: the group's are
/// the mask, where there is one. `None` if the stored form is malformed.
pub fn permissions(stored: &[u8]) -> Option<u32> {
    let (mut user, mut group, mut mask, mut other) = (None, None, None, None);
    for (tag, bits, _) in entries(stored)? {
        let place = match tag {
            USER_OBJ => &mut user,
            GROUP_OBJ => &mut group,
            MASK => &mut mask,
            OTHER => &mut other,
            _ => continue,
        };
        *place = Some(u32::from(bits & 7));
    }
    Some(user? << 6 | mask.or(group)? << 3 | other?)
}

/// Tag, permissions and number of each entry.
fn entries(stored: &[u8]) -> Option<impl Iterator<Item = (u16, u16, u32)> + '_> {
    let (version, entries) = stored.split_first_chunk()?;
    if u32::from_le_bytes(*version) != VERSION || !entries.len().is_multiple_of(8) {
        return None;
    }
    Some(entries.chunks_exact(8).map(|entry| {
        let tag = u16::from_le_bytes([entry[0], entry[1]]);
        let bits = u16::from_le_bytes([entry[2], entry[3]]);
        (tag, bits, u32::from_le_bytes([entry[4], entry[5], entry[6], entry[7]]))
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nobody(_: Named, _: &str) -> Option<u32> {
        None
    }

    #[test]
    fn acl_text_and_back() {
        let text = "user::rw-,user:1000:r-x,group::r--,group:7:rwx,mask::rwx,other::---";
        assert_eq!(to_text(&from_text(text.as_bytes(), &nobody).unwrap()).unwrap(), text);
    }

    #[test]
    fn acl_libarchive_form_takes_the_number() {
        let stored =
            from_text(b"user::rw-,user:lisa:r--:1004,group::r--,other::r--,mask::r--", &nobody);
        let text = to_text(&stored.unwrap()).unwrap();
        assert_eq!(text, "user::rw-,user:1004:r--,group::r--,mask::r--,other::r--");
    }

    #[test]
    fn acl_unknown_name_or_malformed_refused() {
        for text in [&b"user:lisa:r--"[..], b"\xff", b"user:1:q", b"mask:1:r--"] {
            assert!(from_text(text, &nobody).is_err());
        }
        let stored = from_text(b"group:lisa:r--", &|named, name| {
            (named == Named::Group && name == "lisa").then_some(7)
        });
        assert_eq!(to_text(&stored.unwrap()).unwrap(), "group:7:r--");
        assert_eq!(system_id(Named::User, "root"), Some(0));
    }

    #[test]
    fn group_bits_are_within_the_mask() {
        let list = b"user::rwx\nuser:lisa:rwx #effective:---\ngroup::r-x #effective:---\nmask::---\nother::---";
        assert_eq!(group_bits(list), Some(0));
        assert_eq!(group_bits(b"user::rwx,group::r-x,mask::rw-,other::---"), Some(4));
        assert_eq!(group_bits(b"user::rwx,group::r-x,other::---"), Some(5));
        assert_eq!(group_bits(b"user::rwx"), None);
    }

    #[test]
    fn permissions_group_is_the_mask() {
        let stored = |text: &[u8]| permissions(&from_text(text, &nobody).unwrap());
        assert_eq!(stored(b"user::rwx,group::r--,mask::rw-,other::--x"), Some(0o761));
        assert_eq!(stored(b"user::rwx,group::r--,other::--x"), Some(0o741));
        assert_eq!(stored(b"user::rwx,mask::rw-"), None);
    }

    #[test]
    fn to_text_malformed_refused() {
        for bytes in [
            &b""[..],
            &[2, 0, 0],
            &[3, 0, 0, 0],
            &[2, 0, 0, 0, 1],
            &[2, 0, 0, 0, 9, 9, 0, 0, 0, 0, 0, 0],
        ] {
            assert_eq!(to_text(bytes), None);
        }
    }
}
