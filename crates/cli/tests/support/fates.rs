//! A script that says what became of calls in a directory, at a mount of ours and at the kernel's.
#![allow(dead_code)] // Each test file uses its part.

use std::path::Path;
use std::process::Command;

use ubtrfs_testkit::KernelMount;

use crate::place::Place;

/// What each of the scripts has.
pub const HEAD: &str = r#"
import os,sys,errno,ctypes,fcntl,struct,time
os.chdir(sys.argv[1])
libc=ctypes.CDLL(None,use_errno=True)
def e(f,*a):
    try: r=f(*a); return 'ok' if r is None else r
    except OSError as x: return errno.errorcode[x.errno]
def mode(p): return oct(os.lstat(p).st_mode&0o7777)
out=lambda *a: print(*a)
# Until the clock that the kernel gives files their times by is past what a server's said, which has no ticks: beside much else a tick may take
# longer than it should, and the kernel's clock is behind by more than one.
def later():
    t=time.clock_gettime_ns(0)
    while time.clock_gettime_ns(5)<=t: time.sleep(0.002)
def setfl(p,bits):
    fd=os.open(p,os.O_RDONLY|os.O_NONBLOCK)
    try:
        old=bytearray(8); fcntl.ioctl(fd,0x80086601,old); v=struct.unpack('I',old[:4])[0]
        fcntl.ioctl(fd,0x40086602,struct.pack('Q',bits))
    finally: os.close(fd)
def as_user(f):
    r,w=os.pipe(); pid=os.fork()
    if pid==0:
        os.setgroups([]); os.setgid(1000); os.setuid(1000)
        try: os.write(w,str(e(f)).encode())
        finally: os._exit(0)
    os.waitpid(pid,0); return os.read(r,100).decode()
def ren(a,b,fl=0):
    if libc.renameat2(-100,a.encode(),-100,b.encode(),fl)<0: raise OSError(ctypes.get_errno(),'')"#;

/// What a script says in a directory, a line each.
#[track_caller]
pub fn fates(top: &Path, script: &str) -> Vec<String> {
    let script = format!("{HEAD}{script}");
    let output = Command::new("python3").args(["-c", &script]).arg(top).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
}

#[track_caller]
pub fn assert_as_with_the_kernel(script: &str) {
    for options in ["relatime", "relatime,writeback"] {
        let Some(place) = Place::new(true) else { return };
        place.mount(&["-o", options]);
        let ours = fates(&place.directory, script);
        place.umount();
        place.assert_clean();
        place.done(&["mkfs", "-f"], &[&place.image]);
        let kernel = KernelMount::read_write(&place.image, "relatime");
        let theirs = fates(kernel.path(), script);
        assert_eq!(ours.len(), theirs.len());
        // With `-o writeback` the kernel says in the same words when what it held back was written, and does not ask where data is.
        let is_kernels = |line: &str| {
            let are_some = options.contains("writeback");
            are_some && (line.contains("(1073741822, ") || line.starts_with("lseek"))
        };
        let differ = ours.iter().zip(&theirs).filter(|(a, b)| a != b && !is_kernels(a));
        let differ: Vec<_> = differ.collect();
        assert!(differ.is_empty(), "{options}: ours, the kernel's: {differ:#?}");
    }
}
