//! What Linux does of rights, flags and names at calls that few programs make: a script says what became of each, here and with the kernel.

#[path = "support/place.rs"]
mod place;

use std::path::Path;
use std::process::Command;

use place::Place;
use ubtrfs_testkit::KernelMount;

/// What each of the scripts has.
const HEAD: &str = r#"
import os,sys,errno,ctypes,fcntl,struct,time
os.chdir(sys.argv[1])
libc=ctypes.CDLL(None,use_errno=True)
def e(f,*a):
    try: r=f(*a); return 'ok' if r is None else r
    except OSError as x: return errno.errorcode[x.errno]
def mode(p): return oct(os.lstat(p).st_mode&0o7777)
out=lambda *a: print(*a)
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
fn fates(top: &Path, script: &str) -> Vec<String> {
    let script = format!("{HEAD}{script}");
    let output = Command::new("python3").args(["-c", &script]).arg(top).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
}

#[track_caller]
fn assert_as_with_the_kernel(script: &str) {
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
        // With `-o writeback` the kernel says in the same words when what it held back was written.
        let is_of_writes =
            |line: &str| options.contains("writeback") && line.contains("(1073741822, ");
        let differ = ours.iter().zip(&theirs).filter(|(a, b)| a != b && !is_of_writes(a));
        let differ: Vec<_> = differ.collect();
        assert!(differ.is_empty(), "{options}: ours, the kernel's: {differ:#?}");
    }
}

/// A chown that names nobody left them, and one of a fifo or a device any.
#[test]
fn chown_takes_rights_from_whatever_runs_with_them_as_with_the_kernel() {
    assert_as_with_the_kernel(
        r#"
for kind in 'file','fifo','dev','dir','link':
    for m in 0o6755,0o6745,0o2745,0o4644:
        for who in (0,0),(-1,-1),(5,-1),(-1,7):
            p='x'
            if kind=='file': open(p,'w').close()
            elif kind=='fifo': os.mkfifo(p)
            elif kind=='dev': os.mknod(p,0o20600,os.makedev(1,3))
            elif kind=='dir': os.mkdir(p)
            else: os.symlink('q',p)
            if kind!='link': os.chmod(p,m)
            c=os.lstat(p).st_ctime_ns; time.sleep(0.006)
            r=e(lambda: os.chown(p,*who,follow_symlinks=False))
            out('chown',kind,oct(m),who,r,mode(p),os.lstat(p).st_ctime_ns!=c)
            os.rmdir(p) if kind=='dir' else os.unlink(p)
# chown -1 -1 with capability
open('c','w').close(); os.setxattr('c','security.capability',bytes.fromhex('0100000201000000000000000000000000000000'))
out('caps chown -1',e(os.chown,'c',-1,-1),e(os.listxattr,'c')); os.unlink('c')
def fall():
    fd=os.open('c',os.O_RDWR); 
    if libc.fallocate(fd,0,ctypes.c_long(0),ctypes.c_long(100))<0: raise OSError(ctypes.get_errno(),'')
open('c','w').close(); os.chmod('c',0o6777); out('fallocate user',as_user(fall),mode('c'))
os.chmod('c',0o6777); out('fallocate root',e(fall),mode('c')); os.unlink('c')
"#,
    );
}
