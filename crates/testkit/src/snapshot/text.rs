//! Snapshots as text, so that one that took long to make can be kept beside its image.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::ops::Range;

use super::{ContentHash, Entry, Kind, Timestamp, TreeSnapshot};

const KINDS: [(Kind, &str); 7] = [
    (Kind::File, "file"),
    (Kind::Directory, "directory"),
    (Kind::Symlink, "symlink"),
    (Kind::CharDevice, "char"),
    (Kind::BlockDevice, "block"),
    (Kind::Fifo, "fifo"),
    (Kind::Socket, "socket"),
];

impl TreeSnapshot {
    /// As text: a line an entry, `key=value` words after the path.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        for (path, entry) in &self.entries {
            write_entry(&mut text, path, entry);
        }
        text
    }

    /// From what [`Self::to_text`] made.
    ///
    /// # Panics
    /// If it is not that.
    pub fn from_text(text: &str) -> Self {
        Self { entries: text.lines().map(read_entry).collect() }
    }
}

fn write_entry(text: &mut String, path: &[u8], entry: &Entry) {
    let mut word = |key: &str, value: String| write!(text, "{key}={value} ").expect("to memory");
    let kind = KINDS.iter().find(|(kind, _)| *kind == entry.kind).expect("all are listed").1;
    word("path", hex(path));
    word("kind", kind.to_owned());
    word("mode", format!("{:o}", entry.mode));
    word("owner", format!("{}:{}", entry.uid, entry.gid));
    let numbers = [
        ("nlink", entry.nlink.map(u64::from)),
        ("size", entry.size_bytes),
        ("inode", entry.inode),
        ("subvolume", entry.subvolume),
    ];
    for (key, value) in numbers {
        if let Some(value) = value {
            word(key, value.to_string());
        }
    }
    let times = [
        ("mtime", entry.mtime),
        ("ctime", entry.ctime),
        ("atime", entry.atime),
        ("btime", entry.btime),
    ];
    for (key, value) in times {
        if let Some(time) = value {
            word(key, format!("{}:{}", time.sec, time.nsec));
        }
    }
    if let Some((major, minor)) = entry.rdev {
        word("rdev", format!("{major}:{minor}"));
    }
    if let Some(target) = &entry.target {
        word("target", hex(target));
    }
    if let Some(content) = entry.content {
        word("content", hex(&content.0));
    }
    if let Some(data) = &entry.data {
        let ranges: Vec<String> = data.iter().map(|r| format!("{}:{}", r.start, r.end)).collect();
        word("data", ranges.join(","));
    }
    if let Some(first) = &entry.link_of {
        word("link_of", hex(first));
    }
    if let Some(xattrs) = &entry.xattrs {
        word("xattrs", String::new());
        for (name, value) in xattrs {
            word("xattr", format!("{}:{}", hex(name), hex(value)));
        }
    }
    text.push('\n');
}

fn read_entry(line: &str) -> (Vec<u8>, Entry) {
    let mut path = Vec::new();
    let mut entry = Entry::new(Kind::File, 0, 0, 0);
    for word in line.split_whitespace() {
        let (key, value) = word.split_once('=').expect("key=value");
        match key {
            "path" => path = unhex(value),
            "kind" => {
                entry.kind = KINDS.iter().find(|(_, name)| *name == value).expect("a kind").0;
            }
            "mode" => entry.mode = u32::from_str_radix(value, 8).expect("octal"),
            "owner" => (entry.uid, entry.gid) = pair(value),
            "nlink" => entry.nlink = Some(number(value)),
            "size" => entry.size_bytes = Some(number(value)),
            "inode" => entry.inode = Some(number(value)),
            "subvolume" => entry.subvolume = Some(number(value)),
            "mtime" => entry.mtime = Some(time(value)),
            "ctime" => entry.ctime = Some(time(value)),
            "atime" => entry.atime = Some(time(value)),
            "btime" => entry.btime = Some(time(value)),
            "rdev" => entry.rdev = Some(pair(value)),
            "target" => entry.target = Some(unhex(value)),
            "content" => {
                entry.content = Some(ContentHash(unhex(value).try_into().expect("32 bytes")));
            }
            "data" => entry.data = Some(ranges(value)),
            "link_of" => entry.link_of = Some(unhex(value)),
            "xattrs" => entry.xattrs = Some(BTreeMap::new()),
            "xattr" => {
                let (name, value) = value.split_once(':').expect("name:value");
                let xattrs = entry.xattrs.as_mut().expect("xattrs= comes first");
                xattrs.insert(unhex(name), unhex(value));
            }
            other => panic!("no such key: {other}"),
        }
    }
    (path, entry)
}

fn number<T: std::str::FromStr>(text: &str) -> T {
    text.parse().unwrap_or_else(|_| panic!("not a number: {text}"))
}

fn pair<T: std::str::FromStr>(text: &str) -> (T, T) {
    let (first, second) = text.split_once(':').expect("two numbers");
    (number(first), number(second))
}

fn time(text: &str) -> Timestamp {
    let (sec, nsec) = text.split_once(':').expect("seconds:nanoseconds");
    Timestamp { sec: number(sec), nsec: number(nsec) }
}

fn ranges(text: &str) -> Vec<Range<u64>> {
    let range = |part: &str| {
        let (start, end) = pair(part);
        start..end
    };
    text.split(',').filter(|part| !part.is_empty()).map(range).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("to memory");
        text
    })
}

fn unhex(text: &str) -> Vec<u8> {
    let digit = |at| u8::from_str_radix(&text[at..at + 2], 16).expect("two digits");
    (0..text.len()).step_by(2).map(digit).collect()
}
