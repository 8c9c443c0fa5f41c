//! Moves a tree from a source to a sink, reading and preparing ahead on other threads.
//!
//! One thread fills batches, workers load and prepare their data, the caller's thread applies
//! them in the order in which they were filled: the outcome does not depend on the number of
//! threads. With [`Executor::Inline`] the caller does everything.
//!
//! 1. At most `AHEAD_BATCHES_MAX` batches and about [`PipelineOptions::ahead_bytes_max`] bytes are
//!    between source and sink.
//! 2. An error is reported in its place: everything before it was applied.

mod queue;
#[cfg(test)]
mod tests;

use ubtrfs_rt::Executor;

use crate::batch::{Batch, Source};
use crate::error::Result;
use crate::progress::{Progress, Report, Summary};
use crate::sink::Sink;
use queue::Queue;

/// Batches between source and sink: bounds the files that are open.
const AHEAD_BATCHES_MAX: usize = 10;

/// How a tree is moved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PipelineOptions {
    /// Threads to load and prepare data.
    pub executor: Executor,
    /// Data that may be between source and sink; at least one batch may.
    pub ahead_bytes_max: usize,
}

impl PipelineOptions {
    /// 32 MiB ahead.
    pub fn new(executor: Executor) -> Self {
        Self { executor, ahead_bytes_max: 32 << 20 }
    }
}

/// Moves the whole of `source` into `sink`.
///
/// # Errors
/// The first error of source, load, preparation or sink, in the order of the stream.
pub fn run<Src: Source, Snk: Sink>(
    source: Src,
    sink: &mut Snk,
    options: &PipelineOptions,
    progress: &mut dyn Progress,
) -> Result<Summary> {
    let mut report = Report::new(progress);
    match options.executor.thread_count() {
        0 => run_inline(source, sink, &mut report)?,
        workers => run_threads(source, sink, workers, options, &mut report)?,
    }
    sink.finish(&mut report)?;
    report.advance();
    Ok(report.done)
}

fn run_inline<Src: Source, Snk: Sink>(
    mut source: Src,
    sink: &mut Snk,
    report: &mut Report<'_>,
) -> Result<()> {
    let prepare = sink.prepare();
    loop {
        let mut batch = Batch::default();
        let more = source.fill(&mut batch);
        let (batch, loaded) = batch.load(&*prepare);
        sink.apply(batch, report)?;
        report.advance();
        loaded?;
        if !more? {
            return Ok(());
        }
    }
}

fn run_threads<Src: Source, Snk: Sink>(
    source: Src,
    sink: &mut Snk,
    workers: usize,
    options: &PipelineOptions,
    report: &mut Report<'_>,
) -> Result<()> {
    let prepare = sink.prepare();
    let queue = Queue::new(AHEAD_BATCHES_MAX, options.ahead_bytes_max);
    std::thread::scope(|scope| {
        // Dropped when this closure ends, however it ends: the threads then stop too.
        let _stop = queue.stop_on_drop();
        scope.spawn(|| read_ahead(source, &queue));
        for _ in 0..workers {
            scope.spawn(|| {
                let _stop = queue.stop_on_panic();
                while let Some((ticket, batch)) = queue.take_work() {
                    queue.put_result(ticket, Batch::load(batch, &*prepare));
                }
            });
        }
        while let Some(((batch, loaded), bytes)) = queue.take_result() {
            sink.apply(batch, report)?;
            queue.release(bytes);
            report.advance();
            loaded?;
        }
        Ok(())
    })
}

fn read_ahead<Src: Source, D>(mut source: Src, queue: &Queue<Src::Load, D>) {
    let _stop = queue.stop_on_panic();
    loop {
        let mut batch = Batch::default();
        let more = source.fill(&mut batch);
        let stopped = !queue.put_work(batch);
        match more {
            _ if stopped => return,
            Ok(true) => {}
            Ok(false) => return queue.end(None),
            Err(error) => return queue.end(Some(error)),
        }
    }
}
