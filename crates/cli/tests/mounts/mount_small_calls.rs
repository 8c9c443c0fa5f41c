//! What Linux does of access control lists, flags and requests that few programs make: by the same script here and with the kernel.

use crate::fates::{assert_as_with_the_kernel, fates};
use crate::place::Place;

/// Each was refused with ENODATA, and programs that take lists off whatever is there said so.
#[test]
fn lists_that_are_not_there_are_taken_off_as_with_the_kernel() {
    assert_as_with_the_kernel(
        r#"
def acl(*entries): return struct.pack('<I',2)+b''.join(struct.pack('<HHI',*entry) for entry in entries)
NONE=0xffffffff
LIST=acl((1,6,NONE),(2,4,1000),(4,4,NONE),(16,4,NONE),(32,4,NONE))
open('file','w').close(); os.mkdir('dir'); os.mkfifo('fifo'); os.symlink('file','link')
for p in 'file','dir','fifo','link':
    for kind in 'access','default':
        name='system.posix_acl_'+kind
        for has_one in False,True:
            if has_one: out(p,kind,'set',e(lambda: os.setxattr(p,name,LIST,follow_symlinks=False)))
            before=os.lstat(p); later()
            out(p,kind,has_one,e(lambda: os.removexattr(p,name,follow_symlinks=False)))
            after=os.lstat(p)
            # With `-o writeback` the kernel moves the time of change itself where there can be no list.
            if kind=='access' or p=='dir': out('  ctime moves',before.st_ctime_ns!=after.st_ctime_ns)
            out('  mtime moves',before.st_mtime_ns!=after.st_mtime_ns,mode(p))
for name in 'user.none','security.none','trusted.none','btrfs.compression': out(name,e(os.removexattr,'file',name))
for bits in 0x10,0x20:
    for p in 'file','dir':
        setfl(p,bits); out(p,bits,e(os.removexattr,p,'system.posix_acl_access')); setfl(p,0)
out('user',as_user(lambda: os.removexattr('file','system.posix_acl_access')))
"#,
    );
}

/// DIRSYNC stuck to regular files, and was shown.
#[test]
fn flags_that_an_inode_cannot_have_are_dropped_as_with_the_kernel() {
    assert_as_with_the_kernel(
        r#"
def words(p,bits):
    fd=os.open(p,os.O_RDONLY|os.O_NONBLOCK)
    try:
        fcntl.ioctl(fd,0x40086602,struct.pack('Q',bits)); shown=bytearray(8); fcntl.ioctl(fd,0x80086601,shown)
        return hex(struct.unpack('I',shown[:4])[0])
    finally: os.close(fd)
def xfs(p,bits):
    fd=os.open(p,os.O_RDONLY|os.O_NONBLOCK)
    try:
        fcntl.ioctl(fd,0x401c5820,struct.pack('5I8x',bits,0,0,0,0)); shown=bytearray(28); fcntl.ioctl(fd,0x801c581f,shown)
        return hex(struct.unpack('I',shown[:4])[0])
    finally: os.close(fd)
open('file','w').close(); os.mkdir('dir'); os.mkfifo('fifo')
for p in 'file','dir','fifo':
    for bits in 0x10000,0x40,0x80,0xc0,0x8,0x20,0x10,0x4,0x400,0x800000,0x10048,0x2,0x10010,0x1,0x404:
        out(p,hex(bits),e(words,p,bits),e(words,p,0))
    for bits in 0x20,0x40,0x80,0x8,0x10:
        out('xfs',p,hex(bits),e(xfs,p,bits),e(words,p,0))
"#,
    );
}

/// What it was, was told.
#[test]
fn requests_at_what_is_left_of_a_deleted_subvolume_end_as_with_the_kernel() {
    assert_as_with_the_kernel(
        r#"
def va(name): return struct.pack('q',0)+name.ljust(4088,b'\0')
def io(fd,number,argument):
    buffer=ctypes.create_string_buffer(argument,len(argument))
    if libc.ioctl(fd,ctypes.c_ulong(number),buffer)<0: raise OSError(ctypes.get_errno(),'')
top=os.open('.',os.O_RDONLY)
io(top,0x5000940e,va(b'sub')); os.mkdir('sub/dir'); open('sub/dir/file','w').close()
opened=[(p,os.open('sub/'+p,os.O_RDONLY)) for p in ('.','dir','dir/file')]
def requests(when):
    for p,fd in opened:
        for what,number,argument in ('info',0x81f8943c,bytes(504)),('children',0xd000943d,bytes(4096)),('flags',0x80089419,bytes(8)),('tree',0xd0009412,struct.pack('QQ',0,256)+bytes(4080)),('delete',0x5000940f,va(b'none')):
            out(when,p,what,e(io,fd,number,argument))
requests('before')
out('delete',e(io,top,0x5000940f,va(b'sub')))
requests('after')
"#,
    );
}

/// Linux makes both durable where the flag is the source's, too.
#[test]
fn copies_of_files_with_the_flag_sync_are_durable() {
    const COPY: &str = r#"
open('source','wb').write(b's'*50000); open('target','wb').close()
setfl('source',0x8)
os.sync(); fd=os.open('.',os.O_RDONLY); os.fsync(fd)
s=os.open('source',os.O_RDONLY); t=os.open('target',os.O_RDWR)
assert os.copy_file_range(s,t,50000,0)>0
"#;
    let Some(place) = Place::new(true) else { return };
    place.mount(&["-o", "commit=3600"]);
    fates(&place.directory, COPY);
    place.cut_off();
    let target = std::path::Path::new("/target");
    assert_eq!(place.done(&["cat"], &[&place.image, target]), "s".repeat(50_000));
    place.assert_clean();
}
