//! User and group numbers to names, by the host's `/etc/passwd` and `/etc/group`.

use std::collections::HashMap;
use std::path::Path;

/// The names of the host, read once; numbers where there is no name or none is wanted.
#[derive(Default)]
pub struct Owners {
    users: HashMap<u32, String>,
    groups: HashMap<u32, String>,
}

impl Owners {
    /// The host's.
    pub fn system() -> Self {
        Self { users: read(Path::new("/etc/passwd")), groups: read(Path::new("/etc/group")) }
    }

    /// No names, numbers only.
    pub fn numeric() -> Self {
        Self::default()
    }

    /// The user's name, or the number.
    pub fn user(&self, uid: u32) -> String {
        self.users.get(&uid).cloned().unwrap_or_else(|| uid.to_string())
    }

    /// The group's name, or the number.
    pub fn group(&self, gid: u32) -> String {
        self.groups.get(&gid).cloned().unwrap_or_else(|| gid.to_string())
    }

    /// The user's name, or `UNKNOWN`, as `stat` words it.
    pub fn user_or_unknown(&self, uid: u32) -> &str {
        self.users.get(&uid).map_or("UNKNOWN", String::as_str)
    }

    /// The group's name, or `UNKNOWN`, as `stat` words it.
    pub fn group_or_unknown(&self, gid: u32) -> &str {
        self.groups.get(&gid).map_or("UNKNOWN", String::as_str)
    }
}

/// Both files hold `name:password:number:…` lines. A host without them has numbers only.
fn read(path: &Path) -> HashMap<u32, String> {
    let bytes = std::fs::read(path).unwrap_or_default();
    let mut names = HashMap::new();
    for line in String::from_utf8_lossy(&bytes).lines() {
        let mut fields = line.split(':');
        if let (Some(name), Some(_), Some(number)) = (fields.next(), fields.next(), fields.next())
            && let Ok(number) = number.parse()
            && !name.chars().any(char::is_control)
        {
            names.entry(number).or_insert_with(|| name.to_owned());
        }
    }
    names
}
