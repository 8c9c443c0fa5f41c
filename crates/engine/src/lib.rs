//! The filesystem: trees, allocation, transactions, files.
#![forbid(unsafe_code)]

pub mod data;
