//! Where trees come from.

mod files;
pub mod image;
pub mod tar;
pub mod walk;
