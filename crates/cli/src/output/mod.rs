//! What goes to standard output: for eyes, for pipes, or as JSON.

pub mod json;
pub mod mode;
pub mod owner;
pub mod quote;
pub mod table;
pub mod time;

use std::io::{self, BufWriter, IsTerminal, Write};

use crate::failure::{Exit, Failure, Result};

/// Standard output, or what takes its place, buffered; and the worst failure so far.
pub struct Output {
    writer: BufWriter<Box<dyn Write>>,
    terminal: bool,
    worst: Exit,
}

impl Output {
    /// The process's standard output.
    pub fn new() -> Self {
        let stdout = io::stdout();
        let terminal = stdout.is_terminal();
        Self::to(stdout.lock(), terminal)
    }

    /// What is shown at a terminal or not, through `writer`.
    pub fn to(writer: impl Write + 'static, terminal: bool) -> Self {
        let writer = BufWriter::with_capacity(64 << 10, Box::new(writer) as Box<dyn Write>);
        Self { writer, terminal, worst: Exit::Done }
    }

    /// Writes bytes as they are.
    pub fn bytes(&mut self, bytes: &[u8]) -> Result<()> {
        self.writer.write_all(bytes).map_err(|error| Failure::stdout(&error))
    }

    /// Writes text.
    pub fn text(&mut self, text: &str) -> Result<()> {
        self.bytes(text.as_bytes())
    }

    /// Writes text and a newline.
    pub fn line(&mut self, text: &str) -> Result<()> {
        self.text(text)?;
        self.text("\n")
    }

    /// Writes a name from the image: quoted at a terminal, as it is elsewhere.
    pub fn name(&mut self, name: &[u8]) -> Result<()> {
        if self.terminal { self.text(&quote::for_terminal(name)) } else { self.bytes(name) }
    }

    /// Hands on what is buffered.
    pub fn flush(&mut self) -> Result<()> {
        self.writer.flush().map_err(|error| Failure::stdout(&error))
    }

    /// Reports the failure of one path and goes on to the next, as coreutils do; a failure that
    /// ends everything is returned.
    pub fn tolerate(&mut self, result: Result<()>) -> Result<()> {
        match result {
            Ok(()) => Ok(()),
            Err(failure) if failure.is_final() => Err(failure),
            Err(failure) => {
                self.flush()?;
                failure.report();
                self.worst = self.worst.max(failure.exit);
                Ok(())
            }
        }
    }

    /// The worst of what was tolerated.
    pub fn exit(&self) -> Exit {
        self.worst
    }
}
