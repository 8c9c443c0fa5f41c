//! What the fields of findings are made of.

use std::fmt;

use ubtrfs_ondisk::extent::BackRef;
use ubtrfs_ondisk::{
    DeviceId, Generation, InodeNo, Key, LogicalAddr, PhysicalAddr, Reason, RootId, Uuid,
};

/// How bad a finding is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub enum Severity {
    /// Damage: the filesystem is not as the format asks.
    Error,
    /// Something that Linux tolerates, puts right by itself or leaves behind in health; or what
    /// could not be judged.
    Note,
}

/// One field of a finding, for output that machines read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Value {
    /// A number.
    Number(u64),
    /// Text.
    Text(String),
    /// Nothing to say.
    None,
}

/// A name as it is stored: bytes, not always text.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Name(pub Vec<u8>);

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", String::from_utf8_lossy(&self.0))
    }
}

/// A slot or device or anything else that is not always known; prints as `-` then.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Maybe<T>(pub Option<T>);

impl<T: fmt::Display> fmt::Display for Maybe<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(value) => value.fmt(f),
            None => f.write_str("-"),
        }
    }
}

/// A back reference in words.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reference(pub BackRef);

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            BackRef::TreeBlock { root } => write!(f, "root {root}"),
            BackRef::SharedBlock { parent } => write!(f, "parent block {parent}"),
            BackRef::ExtentData { root, inode, offset, count } => {
                write!(f, "root {root} inode {inode} offset {offset} count {count}")
            }
            BackRef::SharedData { parent, count } => {
                write!(f, "parent block {parent} count {count}")
            }
            BackRef::Owner { root } => write!(f, "owner {root}"),
        }
    }
}

/// A field as a value.
pub(super) trait ToValue {
    fn to_value(&self) -> Value;
}

macro_rules! numbers {
    ($($ty:ty => |$it:ident| $number:expr,)*) => {
        $(impl ToValue for $ty {
            fn to_value(&self) -> Value {
                let $it = self;
                Value::Number($number)
            }
        })*
    };
}

numbers! {
    u64 => |it| *it,
    RootId => |it| it.0,
    InodeNo => |it| it.0,
    LogicalAddr => |it| it.0,
    PhysicalAddr => |it| it.0,
    DeviceId => |it| it.0,
    Generation => |it| it.0,
}

macro_rules! texts {
    ($($ty:ty,)*) => {
        $(impl ToValue for $ty {
            fn to_value(&self) -> Value {
                Value::Text(self.to_string())
            }
        })*
    };
}

texts! { String, &'static str, Key, Uuid, Reason, Reference, }

impl ToValue for Name {
    fn to_value(&self) -> Value {
        Value::Text(String::from_utf8_lossy(&self.0).into_owned())
    }
}

impl<T: ToValue> ToValue for Maybe<T> {
    fn to_value(&self) -> Value {
        self.0.as_ref().map_or(Value::None, ToValue::to_value)
    }
}
