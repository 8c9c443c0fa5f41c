//! Running a job as a process, and what it used.
//!
//! The peak memory is the kernel's `VmHWM` of the child, as `wait4` returns it. A child begins
//! with the memory of the process that starts it, so this process must stay small: it does no
//! measured work itself.

use std::fs::File;
use std::io::{Read, Seek};
use std::ops::AddAssign;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::pipe::{SpliceFlags, fcntl_setpipe_size, splice};

use crate::error::{Error, Result};

/// Bytes of the pipe that takes a job's output; the most that is allowed without privilege.
const PIPE_BYTES: usize = 1 << 20;

/// What a job used.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct Usage {
    /// From its start to its end.
    pub(crate) wall: Duration,
    /// Of all its threads, in user space and in system calls. Not that of kernel threads.
    pub(crate) cpu: Duration,
    /// Most memory resident at once.
    pub(crate) peak_bytes: u64,
    /// What it wrote to its standard output.
    pub(crate) output_bytes: u64,
}

impl AddAssign for Usage {
    /// One job after the other.
    fn add_assign(&mut self, other: Self) {
        self.wall += other.wall;
        self.cpu += other.cpu;
        self.peak_bytes = self.peak_bytes.max(other.peak_bytes);
        self.output_bytes += other.output_bytes;
    }
}

/// Runs a job whose output is thrown away.
///
/// # Errors
/// `Command` when it fails, with what it said.
pub(crate) fn run(command: &mut Command) -> Result<Usage> {
    command.stdout(Stdio::null());
    timed(command, |_| Ok(0))
}

/// Runs a job whose output goes through a pipe to nowhere, the same way for all contestants: some
/// do no work when they see that they write to `/dev/null`.
///
/// # Errors
/// As [`run`].
pub(crate) fn run_into_pipe(command: &mut Command) -> Result<Usage> {
    command.stdout(Stdio::piped());
    timed(command, |child| {
        let pipe = child.stdout.take().expect("its output was made a pipe");
        // As large as allowed: less is no error.
        let _ = fcntl_setpipe_size(&pipe, PIPE_BYTES);
        let nowhere = File::options().write(true).open("/dev/null");
        let nowhere = nowhere.map_err(Error::io("open /dev/null"))?;
        let mut bytes = 0;
        loop {
            match splice(&pipe, None, &nowhere, None, PIPE_BYTES, SpliceFlags::MOVE) {
                Ok(0) => return Ok(bytes),
                Ok(count) => bytes += count as u64,
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(Error::io("read a job's output")(errno.into())),
            }
        }
    })
}

/// Runs a job and returns what it printed.
///
/// # Errors
/// As [`run`].
pub(crate) fn run_for_text(command: &mut Command) -> Result<(Usage, String)> {
    command.stdout(Stdio::piped());
    let mut text = String::new();
    let usage = timed(command, |child| {
        let mut pipe = child.stdout.take().expect("its output was made a pipe");
        let bytes = pipe.read_to_string(&mut text).map_err(Error::io("read a job's output"))?;
        Ok(bytes as u64)
    })?;
    Ok((usage, text))
}

fn timed(command: &mut Command, drain: impl FnOnce(&mut Child) -> Result<u64>) -> Result<Usage> {
    let mut said = tempfile::tempfile().map_err(Error::io("make a temporary file"))?;
    let stderr = said.try_clone().map_err(Error::io("make a temporary file"))?;
    command.stdin(Stdio::null()).stderr(stderr);
    let shown = format!("{command:?}");
    let start = Instant::now();
    let mut child = command.spawn().map_err(Error::io(format!("start {shown}")))?;
    let drained = drain(&mut child);
    let (status, usage) = wait(&child).map_err(Error::io(format!("wait for {shown}")))?;
    let wall = start.elapsed();
    if !status.success() {
        let mut text = String::new();
        let _ = said.rewind().and_then(|()| said.read_to_string(&mut text));
        return Err(Error::Command { command: shown, status: status.to_string(), said: text });
    }
    Ok(Usage { wall, output_bytes: drained?, ..usage })
}

/// Waits for a child and asks what it used.
fn wait(child: &Child) -> std::io::Result<(ExitStatus, Usage)> {
    use std::os::unix::process::ExitStatusExt;
    let pid = libc::pid_t::try_from(child.id()).expect("a process id is one");
    let mut status = 0;
    // SAFETY: all of rusage is numbers, for which zeros are a value.
    let mut used: libc::rusage = unsafe { std::mem::zeroed() };
    loop {
        // SAFETY: both pointers are to live variables of the types that wait4 fills. The child was
        // not waited for yet: `Child` does so only when asked to, and nobody else has it.
        let waited = unsafe { libc::wait4(pid, &raw mut status, 0, &raw mut used) };
        if waited == pid {
            break;
        }
        let error = std::io::Error::last_os_error();
        if error.kind() != std::io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    let usage = Usage {
        cpu: duration(used.ru_utime) + duration(used.ru_stime),
        peak_bytes: u64::try_from(used.ru_maxrss).unwrap_or(0) * 1024,
        ..Usage::default()
    };
    Ok((ExitStatus::from_raw(status), usage))
}

fn duration(time: libc::timeval) -> Duration {
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let micros = u64::try_from(time.tv_usec).unwrap_or(0);
    Duration::from_secs(seconds) + Duration::from_micros(micros)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn job_is_waited_for_and_its_memory_is_known() {
        let mut command = Command::new("sh");
        command.args(["-c", "printf hello"]);
        let (usage, text) = run_for_text(&mut command).unwrap();
        assert_eq!(text, "hello");
        assert!(usage.peak_bytes > 100_000, "{usage:?}");
    }

    #[test]
    fn output_through_the_pipe_is_counted() {
        let mut command = Command::new("head");
        command.args(["-c", "3000000", "/dev/zero"]);
        assert_eq!(run_into_pipe(&mut command).unwrap().output_bytes, 3_000_000);
    }

    #[test]
    fn job_that_fails_is_an_error_with_its_words() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo no luck >&2; exit 3"]);
        let error = run(&mut command).unwrap_err().to_string();
        assert!(error.contains("no luck") && error.contains('3'), "{error}");
    }
}
