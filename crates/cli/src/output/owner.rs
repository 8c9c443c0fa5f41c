//! User and group numbers to names, by the host's `/etc/passwd` and `/etc/group`.

use std::collections::HashMap;
use std::path::Path;

/// The names of the host, read once; none where none are wanted.
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

    /// The user's name, if there is one.
    pub fn user(&self, uid: u32) -> Option<&str> {
        self.users.get(&uid).map(String::as_str)
    }

    /// The group's name, if there is one.
    pub fn group(&self, gid: u32) -> Option<&str> {
        self.groups.get(&gid).map(String::as_str)
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
