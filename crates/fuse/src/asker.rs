//! What `/proc` tells of who makes a request, where the request does not. It is asked without this server: nothing of it lies in the mount.
//!
//! Who makes an ioctl waits for its answer, so it is there yet, and makes nothing else. One of a PID namespace that this process does not see
//! has number 0, of which nothing is told.

use std::time::Duration;

use rustix::io::Errno;

use crate::abi::InHeader;
use crate::message::Result;
use crate::mount;
use crate::own;
use crate::server::Server;

/// A thread that was answered at once may not sleep yet, and then says nothing of its call: it is looked at so often.
const LOOKS: u32 = 20;
const LOOK_AGAIN: Duration = Duration::from_micros(200);

/// What a process has open.
struct OpenFile {
    /// The mount by which it was opened, as the first field of `mountinfo` has it.
    mount: String,
    inode_number: u64,
}

/// Source: proc_pid_fdinfo(5).
fn open_file(pid: u32, descriptor: i64) -> Result<OpenFile> {
    let about = std::fs::read_to_string(format!("/proc/{pid}/fdinfo/{descriptor}"))
        .map_err(|_| Errno::BADF)?;
    let value = |name: &str| about.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let number = value("ino:").and_then(|number| number.parse().ok());
    let (mount, inode_number) = value("mnt_id:").zip(number).ok_or(Errno::OPNOTSUPP)?;
    Ok(OpenFile { mount: mount.to_owned(), inode_number })
}

/// What a process masks of the modes of what it makes, which the kernel does not say of an ioctl.
pub(crate) fn umask_of(pid: u32) -> u32 {
    const USUAL: u32 = 0o022;
    let about = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let value = about.lines().find_map(|line| line.strip_prefix("Umask:"));
    value.and_then(|value| u32::from_str_radix(value.trim(), 8).ok()).unwrap_or(USUAL)
}

/// Whether a thread has CAP_SYS_ADMIN, which root may be without, where this server is. One of which nothing is told has not.
pub(crate) fn may_administer(pid: u32) -> bool {
    let about = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    has_sys_admin(&about) && is_in_our_user_namespace(pid)
}

/// What a thread may is told as of its own user namespace, and in one that he makes anybody may anything. Of one that has rights which this process
/// has not it may not be told (ptrace(2)).
fn is_in_our_user_namespace(pid: u32) -> bool {
    const NAMESPACE: &str = "ns/user";
    let its = std::fs::read_link(format!("/proc/{pid}/{NAMESPACE}"));
    let ours = own::read_own_link(NAMESPACE);
    its.ok().zip(ours.ok()).is_some_and(|(its, ours)| its == ours)
}

/// Source: proc_pid_status(5); the capability's number is of `linux/capability.h`.
fn has_sys_admin(about: &str) -> bool {
    const SYS_ADMIN: u64 = 1 << 21;
    let value = about.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let held = value.and_then(|value| u64::from_str_radix(value.trim(), 16).ok());
    held.is_some_and(|held| held & SYS_ADMIN != 0)
}

/// The descriptor by which a thread makes the ioctl `command`, if that is told: of others than its own threads root hears it, and perhaps
/// nobody else (ptrace(2)).
fn descriptor_of_ioctl(thread: u32, command: u32) -> Option<i64> {
    for look in 0..LOOKS {
        if look > 0 {
            std::thread::sleep(LOOK_AGAIN);
        }
        let call = std::fs::read_to_string(format!("/proc/{thread}/syscall")).ok()?;
        if call.trim() != "running" {
            return descriptor_in(&call, command);
        }
    }
    None
}

/// Source: `NUMBER ARGUMENT… STACK PLACE`, all but the first hexadecimal, proc_pid_syscall(5). Of the numbers each kind of machine has its own.
fn descriptor_in(call: &str, command: u32) -> Option<i64> {
    let mut arguments = call.split(' ').skip(1).map(|argument| {
        let digits = argument.trim().strip_prefix("0x")?;
        u64::from_str_radix(digits, 16).ok()
    });
    let (descriptor, asked) = (arguments.next()??, arguments.next()??);
    // The kernel looks at 32 bits of both.
    let low = |argument: u64| argument & u64::from(u32::MAX);
    (low(asked) == u64::from(command)).then(|| i64::try_from(low(descriptor)).ok()).flatten()
}

impl Server {
    /// Whether who makes the ioctl `command` may change nothing: by the mount of his descriptor, as in Linux, where that can be told, and
    /// else by those that he sees. The kernel does not look at that for an ioctl.
    pub(crate) fn is_read_only_to(&self, header: &InHeader, command: u32) -> bool {
        let Some(device) = self.device() else { return false };
        let open = descriptor_of_ioctl(header.pid, command)
            .and_then(|descriptor| open_file(header.pid, descriptor).ok());
        mount::is_read_only_to(header.pid, device, open.as_ref().map(|open| open.mount.as_str()))
    }

    /// The inode number of what a process has open, if it lies in this mount.
    pub(crate) fn number_of_open_file(&self, pid: u32, descriptor: i64) -> Result<u64> {
        let open = open_file(pid, descriptor)?;
        match mount::device_of(pid, &open.mount).zip(self.device()) {
            Some((theirs, ours)) if theirs == ours => Ok(open.inode_number),
            Some(_) => Err(Errno::XDEV),
            None => Err(Errno::BADF),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capability_is_that_which_is_in_effect() {
        let about = |held: &str| format!("CapPrm:\t000001ffffffffff\nCapEff:\t{held}\n");
        let found = ["000001ffffffffff", "000001ffffdfffff", "0000000000200000", "x"]
            .map(|held| has_sys_admin(&about(held)));
        assert_eq!(found, [true, false, true, false]);
        assert!(!has_sys_admin(""));
    }

    #[test]
    fn descriptor_is_that_of_the_call_that_waits() {
        let call = "16 0x3 0x5000940e 0x7ffd0 0x0 0x0 0x0 0x7ffd8 0x7f00\n";
        assert_eq!(descriptor_in(call, 0x5000_940e), Some(3));
        // One of 32 bits.
        assert_eq!(descriptor_in("54 0xffffffff00000005 0xffffffff9408 0x0", 0xffff_9408), Some(5));
        for other in ["", "-1 0x7ffd8 0x7f00\n", "0 0x3 0x7ffd0 0x20", "running"] {
            assert_eq!(descriptor_in(other, 0x5000_940e), None, "{other}");
        }
    }
}
