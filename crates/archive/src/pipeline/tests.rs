use super::*;
use crate::batch::{Load, Loaded, Prepare, Step};
use crate::error::{Cause, Error, WarningKind};

/// Batches whose number is their warning's path; one of them may fail to load.
struct Numbered {
    next: u64,
    end: u64,
    fail: Option<u64>,
}

struct NumberedLoad(u64, bool);

impl Load for NumberedLoad {
    fn load(self, len_bytes: usize) -> Result<Loaded, Cause> {
        // The earlier the batch, the longer it takes: order is not that of completion.
        std::thread::sleep(std::time::Duration::from_micros(500 * (5 - self.0 % 5)));
        if self.1 {
            return Err(std::io::Error::other("asked to fail").into());
        }
        Ok(Loaded { bytes: vec![1; len_bytes], grew: false })
    }
}

impl Source for Numbered {
    type Load = NumberedLoad;

    fn fill(&mut self, batch: &mut Batch<NumberedLoad>) -> Result<bool> {
        if self.next == self.end {
            return Err(Error::refused(&b"end"[..], "the source fails here"));
        }
        let data = NumberedLoad(self.next, self.fail == Some(self.next));
        batch.push(Step::Data { offset: self.next, len_bytes: 100_000, data }, 100_000);
        batch.warn(&b"x"[..], WarningKind::Grew);
        self.next += 1;
        Ok(true)
    }
}

#[derive(Default)]
struct Collect {
    seen: Vec<u64>,
    fail: Option<u64>,
}

struct Pass;

impl Prepare<Vec<u8>> for Pass {
    fn prepare(&self, bytes: Vec<u8>, _: bool) -> Result<Vec<u8>, Cause> {
        Ok(bytes)
    }
}

impl Sink for Collect {
    type Data = Vec<u8>;

    fn prepare(&self) -> Box<dyn Prepare<Vec<u8>>> {
        Box::new(Pass)
    }

    fn apply(&mut self, batch: Batch<Vec<u8>>, report: &mut Report<'_>) -> Result<()> {
        for step in batch.steps {
            match step {
                Step::Data { offset, .. } => {
                    if self.fail == Some(offset) {
                        return Err(Error::refused(&b"sink"[..], "the sink fails here"));
                    }
                    self.seen.push(offset);
                }
                Step::Warning(warning) => report.warn(&warning),
                other => panic!("{:?}", std::mem::discriminant(&other)),
            }
        }
        Ok(())
    }

    fn finish(&mut self, _: &mut Report<'_>) -> Result<()> {
        Ok(())
    }
}

const EXECUTORS: [Executor; 3] = [Executor::Inline, Executor::Threads(1), Executor::Threads(5)];

fn run_with(source: Numbered, sink: &mut Collect, executor: Executor) -> Error {
    let options = PipelineOptions { executor, ahead_bytes_max: 300_000 };
    run(source, sink, &options, &mut Vec::new()).unwrap_err()
}

#[test]
fn run_any_executor_in_order_and_source_error_last() {
    for executor in EXECUTORS {
        let mut sink = Collect::default();
        let error = run_with(Numbered { next: 0, end: 60, fail: None }, &mut sink, executor);
        assert_eq!(sink.seen, (0..60).collect::<Vec<_>>());
        assert!(error.to_string().contains("the source fails"), "{error}");
    }
}

#[test]
fn run_load_fails_everything_before_applied() {
    for executor in EXECUTORS {
        let mut sink = Collect::default();
        let error = run_with(Numbered { next: 0, end: 60, fail: Some(31) }, &mut sink, executor);
        assert_eq!(sink.seen, (0..31).collect::<Vec<_>>());
        assert!(error.to_string().contains("asked to fail"), "{error}");
    }
}

/// One batch of three files, the second of which fails to load.
struct OneBatch;

impl Source for OneBatch {
    type Load = NumberedLoad;

    fn fill(&mut self, batch: &mut Batch<NumberedLoad>) -> Result<bool> {
        for number in 0..3 {
            let data = NumberedLoad(number, number == 1);
            batch.push(Step::Data { offset: number, len_bytes: 10, data }, 10);
        }
        Ok(false)
    }
}

/// Of a batch with a file that could not be read the files before it were left out, too: up to 63.
#[test]
fn run_load_fails_what_is_before_it_in_its_batch_applied() {
    for executor in EXECUTORS {
        let mut sink = Collect::default();
        let options = PipelineOptions::new(executor);
        let error = run(OneBatch, &mut sink, &options, &mut Vec::new()).unwrap_err();
        assert_eq!(sink.seen, [0]);
        assert!(error.to_string().contains("asked to fail"), "{error}");
    }
}

#[test]
fn run_sink_fails_everybody_stops() {
    for executor in EXECUTORS {
        let mut sink = Collect { fail: Some(7), ..Collect::default() };
        let error = run_with(Numbered { next: 0, end: u64::MAX, fail: None }, &mut sink, executor);
        assert_eq!(sink.seen, (0..7).collect::<Vec<_>>());
        assert!(error.to_string().contains("the sink fails"), "{error}");
    }
}
