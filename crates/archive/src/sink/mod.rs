//! Where trees go.

pub mod contract;
mod directories;
pub mod directory;
pub mod image;
pub mod tar;
pub mod tree;

use crate::batch::{Batch, Prepare};
use crate::error::Result;
use crate::progress::Report;

/// A tree to be written.
pub trait Sink {
    /// Data, prepared for it.
    type Data: Send;

    /// What prepares the data, on any thread.
    fn prepare(&self) -> Box<dyn Prepare<Self::Data>>;

    /// Applies the steps of a batch; batches come in order.
    ///
    /// # Errors
    /// What stops the writing, with the path it concerns.
    fn apply(&mut self, batch: Batch<Self::Data>, report: &mut Report<'_>) -> Result<()>;

    /// Called once after the last batch: what had to wait is done.
    ///
    /// # Errors
    /// As [`Sink::apply`].
    fn finish(&mut self, report: &mut Report<'_>) -> Result<()>;
}
