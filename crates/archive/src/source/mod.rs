//! Where trees come from.

pub mod tar;
pub mod walk;
