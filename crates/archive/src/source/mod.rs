//! Where trees come from.

pub mod image;
pub mod tar;
pub mod walk;
