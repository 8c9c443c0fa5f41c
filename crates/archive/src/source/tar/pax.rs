//! Records of extended headers, and what they say of extended attributes.

use std::collections::{BTreeMap, HashSet};

use crate::acl;
use crate::entry::xattr_is_storable;
use crate::error::{ArchiveProblem, BytePath, WarningKind};

/// Records of an extended header, in order.
#[derive(Clone, Debug, Default)]
pub struct Records(Vec<(Vec<u8>, Vec<u8>)>);

impl Records {
    /// Reads records: `length key=value\n`, where the length is decimal and counts everything.
    ///
    /// # Errors
    /// `BadPax`.
    pub fn parse(mut bytes: &[u8]) -> Result<Self, ArchiveProblem> {
        let bad = |why| ArchiveProblem::BadPax { why };
        let mut records = Vec::new();
        // Some writers fill up with NUL.
        while !bytes.is_empty() && bytes[0] != 0 {
            let space = bytes.iter().take(20).position(|&b| b == b' ');
            let space = space.ok_or(bad("a record has no length"))?;
            let digits = std::str::from_utf8(&bytes[..space]).unwrap_or_default();
            let len: usize = digits.parse().map_err(|_| bad("a record's length is no number"))?;
            let record = bytes.get(space + 1..len).ok_or(bad("a record's length is wrong"))?;
            let record = record.strip_suffix(b"\n").ok_or(bad("a record has no end"))?;
            let equals = record.iter().position(|&b| b == b'=');
            let equals = equals.ok_or(bad("a record has no \"=\""))?;
            records.push((record[..equals].to_vec(), record[equals + 1..].to_vec()));
            bytes = &bytes[len..];
        }
        Ok(Self(records))
    }

    /// Adds those of a later header, which count more.
    pub fn extend(&mut self, later: Self) {
        let keys: HashSet<&[u8]> = later.0.iter().map(|(key, _)| key.as_slice()).collect();
        self.0.retain(|(key, _)| !keys.contains(key.as_slice()));
        self.0.extend(later.0);
    }

    /// Bytes of keys and values.
    pub fn len_bytes(&self) -> usize {
        self.0.iter().map(|(key, value)| key.len() + value.len()).sum()
    }

    /// The value of a key; an empty one counts as absent.
    pub fn value(&self, key: &[u8]) -> Option<&[u8]> {
        let found = self.0.iter().rev().find(|(k, _)| k == key)?;
        (!found.1.is_empty()).then_some(&found.1)
    }

    /// All records, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.0.iter().map(|(key, value)| (key.as_slice(), value.as_slice()))
    }

    /// The extended attributes, and what could not be taken.
    pub fn xattrs(&self) -> Xattrs {
        let Xattrs { mut found, mut warnings, mut group_bits } = Xattrs::default();
        let mut acls = Vec::new();
        for (key, value) in self.iter() {
            let (name, value) = if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
                (unescape(name), value.to_vec())
            } else if let Some(name) = key.strip_prefix(b"LIBARCHIVE.xattr.") {
                let name = unescape(name);
                // The other form of the same attribute needs no decoding.
                if found.contains_key(&name) {
                    continue;
                }
                match base64(value) {
                    Some(value) => (name, value),
                    None => {
                        let (name, why) = (BytePath(name), "it is not base64".to_owned());
                        warnings.push(WarningKind::XattrRefused { name, why });
                        continue;
                    }
                }
            } else if key == b"RHT.security.selinux" {
                (b"security.selinux".to_vec(), [value, b"\0"].concat())
            } else {
                acls.push((key, value));
                continue;
            };
            if name.len() > 255 || name.contains(&0) || !xattr_is_storable(&name) {
                warnings.push(WarningKind::XattrNamespace(BytePath(name)));
                continue;
            }
            found.insert(name, value);
        }
        for (key, value) in acls {
            let Some(name) = acl_name(key) else { continue };
            // The stored form of the same list says more.
            if found.contains_key(name) {
                continue;
            }
            match acl::from_text(value, &acl::system_id) {
                Ok(stored) if says_nothing(name, &stored) => {}
                Ok(stored) => _ = found.insert(name.to_vec(), stored),
                Err(why) => {
                    warnings.push(WarningKind::Acl(why));
                    if name.ends_with(b"access") {
                        group_bits = acl::group_bits(value);
                    }
                }
            }
        }
        Xattrs { found, warnings, group_bits }
    }
}

/// What records say of extended attributes.
#[derive(Debug, Default)]
pub struct Xattrs {
    /// By name.
    pub found: BTreeMap<Vec<u8>, Vec<u8>>,
    /// What could not be taken.
    pub warnings: Vec<WarningKind>,
    /// What the file's group may do where its access control list is among that: the mode has the list's mask in that place.
    pub group_bits: Option<u32>,
}

/// The attribute that holds an access control list given as text.
fn acl_name(key: &[u8]) -> Option<&'static [u8]> {
    match key {
        b"SCHILY.acl.access" => Some(b"system.posix_acl_access"),
        b"SCHILY.acl.default" => Some(b"system.posix_acl_default"),
        _ => None,
    }
}

/// Whether a list has no entries, or none that the mode does not have.
fn says_nothing(name: &[u8], stored: &[u8]) -> bool {
    const VERSION_BYTES: usize = 4;
    const ENTRY_BYTES: usize = 8;
    let entries = (stored.len() - VERSION_BYTES) / ENTRY_BYTES;
    entries == 0 || name.ends_with(b"access") && entries <= 3
}

/// Undoes `%XX`: GNU tar writes `%` and `=` of an attribute's name so, libarchive more.
fn unescape(name: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(name.len());
    let mut rest = name;
    while let Some((&byte, after)) = rest.split_first() {
        let code = after.get(..2).and_then(|hex| std::str::from_utf8(hex).ok());
        match code.filter(|_| byte == b'%').and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(code) => {
                plain.push(code);
                rest = &after[2..];
            }
            None => {
                plain.push(byte);
                rest = after;
            }
        }
    }
    plain
}

/// Decodes base64, with or without padding.
fn base64(text: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut count) = (0_u32, 0);
    for &c in text.iter().filter(|c| !c.is_ascii_whitespace() && **c != b'=') {
        let value = match c {
            b'A'..=b'Z' => c - b'A',
            b'a'..=b'z' => c - b'a' + 26,
            b'0'..=b'9' => c - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count & 0xff).to_le_bytes()[0]);
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_parse_lengths_count_everything() {
        let records = Records::parse(b"12 path=abc\n9 a=b=c\n\n0").unwrap_err();
        assert!(matches!(records, ArchiveProblem::BadPax { .. }));
        let records = Records::parse(b"12 path=abc\n8 a=b\nc\n\0\0").unwrap();
        assert_eq!(records.value(b"path"), Some(&b"abc"[..]));
        assert_eq!(records.value(b"a"), Some(&b"b\nc"[..]));
    }

    #[test]
    fn records_malformed_refused() {
        for bytes in
            [&b"x"[..], b"99 a=b\n", b"3 a\n", b"7 a=bcd", b"5 ab\n", b"1 a=b\n", b"0 a=b\n"]
        {
            assert!(Records::parse(bytes).is_err(), "{bytes:?}");
        }
    }

    #[test]
    fn records_later_header_counts_more() {
        let mut records = Records::parse(b"8 a=old\n6 b=x\n").unwrap();
        records.extend(Records::parse(b"8 a=new\n").unwrap());
        assert_eq!(records.value(b"a"), Some(&b"new"[..]));
        assert_eq!(records.value(b"b"), Some(&b"x"[..]));
    }

    /// One that could not be decoded was an empty one; and of a file whose list was left out its group could do what the mask let others.
    #[test]
    fn xattrs_that_cannot_be_taken_are_told() {
        let mut records = Records::default();
        let mut add = |key: &[u8], value: &[u8]| records.0.push((key.to_vec(), value.to_vec()));
        add(b"LIBARCHIVE.xattr.user.a", b"a*b");
        add(
            b"SCHILY.acl.access",
            b"user::rwx,user:nobody here:rwx,group::r--,mask::rwx,other::---",
        );
        let Xattrs { found, warnings, group_bits } = records.xattrs();
        assert!(found.is_empty());
        assert_eq!((warnings.len(), group_bits), (2, Some(4)), "{warnings:?}");
        assert!(warnings[0].to_string().contains("user.a not set"), "{}", warnings[0]);
    }

    #[test]
    fn xattrs_of_each_dialect() {
        let mut records = Records::default();
        let mut add = |key: &[u8], value: &[u8]| records.0.push((key.to_vec(), value.to_vec()));
        add(b"SCHILY.xattr.user.a%3Db", b"1\n2");
        add(b"LIBARCHIVE.xattr.user.%c3%a9", b"aGVsbG8");
        add(b"RHT.security.selinux", b"label");
        add(b"SCHILY.xattr.system.nfs4_acl", b"?");
        let Xattrs { found: xattrs, warnings, group_bits } = records.xattrs();
        assert_eq!(group_bits, None);
        let expected: [(&[u8], &[u8]); 3] = [
            (b"security.selinux", b"label\0"),
            (b"user.a=b", b"1\n2"),
            ("user.é".as_bytes(), b"hello"),
        ];
        assert_eq!(xattrs, BTreeMap::from(expected.map(|(n, v)| (n.to_vec(), v.to_vec()))));
        assert_eq!(warnings.len(), 1);
    }
}
