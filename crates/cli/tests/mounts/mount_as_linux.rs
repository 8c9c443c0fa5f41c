//! What Linux does of rights, flags and names at calls that few programs make: a script says what became of each, here and with the kernel.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::fates::{HEAD, assert_as_with_the_kernel, fates};
use crate::place::Place;
use ubtrfs_testkit::KernelMount;

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
            c=os.lstat(p).st_ctime_ns; later()
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

/// An append to a file with rights was refused, as was `touch`, and a rename into such a directory.
#[test]
fn append_only_allows_what_it_does_with_the_kernel() {
    assert_as_with_the_kernel(
        r#"
def app(): 
    fd=os.open('a',os.O_WRONLY|os.O_APPEND); os.write(fd,b'x'); os.close(fd)
for what in 'caps','suid','both':
    open('a','w').close(); os.chmod('a',0o6777 if what!='caps' else 0o777)
    if what!='suid': os.setxattr('a','security.capability',bytes.fromhex('0100000201000000000000000000000000000000'))
    setfl('a',0x20)
    out('append',what,as_user(app),mode('a'),os.listxattr('a'),os.stat('a').st_size)
    out('append root',what,e(app),mode('a'),os.listxattr('a'),os.stat('a').st_size)
    setfl('a',0); os.unlink('a')
os.mkdir('ad'); open('a','w').close(); open('i','w').close()
setfl('ad',0x20); setfl('a',0x20); setfl('i',0x10)
class TS(ctypes.Structure): _fields_=[('s',ctypes.c_long),('n',ctypes.c_long)]
def ut(p,a,m):
    t=(TS*2)(TS(1,a),TS(1,m))
    if libc.utimensat(-100,p.encode(),t,0)<0: raise OSError(ctypes.get_errno(),'')
NOW,OMIT=0x3fffffff,0x3ffffffe
for p in 'a','ad','i':
    for a in ((NOW,NOW),(NOW,OMIT),(OMIT,NOW),(5,5),(OMIT,5),(NOW,5),(OMIT,OMIT)):
        out('utimes',p,a,e(ut,p,*a))
    out('utimes null',p,e(os.utime,p))
    out('chown',p,e(os.chown,p,-1,-1),e(os.chown,p,3,-1),'chmod',e(os.chmod,p,0o600),'trunc',e(os.truncate,p,0))
os.chmod('.',0o777)
os.mkdir('d'); open('d/f','w').close(); open('f1','w').close(); os.mkdir('d1')
out('ren into',e(ren,'f1','ad/n')); out('ren dir into',e(ren,'d1','ad/dn'))
open('f1','w').close()
out('over',e(ren,'f1','ad/n')); out('exch',e(ren,'f1','ad/n',2)); out('wo',e(ren,'f1','ad/w',4))
open('f2','w').close()
out('wo2',e(ren,'f2','ad/n',4)); out('nore',e(ren,'f2','ad/nr',1)); 
open('f2','w').close()
out('nore exist',e(ren,'f2','ad/nr',1))
out('out',e(ren,'ad/nr','z')); out('within',e(ren,'ad/nr','ad/zz')); out('within nore',e(ren,'ad/nr','ad/zz',1));out('missing',e(ren,'nothing','ad/zz')); out('self',e(ren,'ad/nr','ad/nr'))
os.link('f2','f2l'); out('exch none',e(ren,'f2','ad/none',2))
setfl('ad',0);setfl('a',0);setfl('i',0)
os.link('f2','ad/same'); setfl('ad',0x20); out('same inode',e(ren,'f2','ad/same'),os.path.exists('f2')); out('into itself', e(ren,'ad','ad/q')); setfl('ad',0)
"#,
    );
}

/// A plain directory was taken for the mounted subvolume, and the default one for none.
#[test]
fn subvolume_requests_refuse_as_the_kernel() {
    assert_as_with_the_kernel(
        r#"
os.mkdir('d')
def va(name): return struct.pack('q',0)+name.ljust(4088,b'\0')
def va2(name,flags=0): return struct.pack('qQQ',0,0,flags)+b'\0'*32+name.ljust(4040,b'\0')
fd=os.open('.',os.O_RDONLY)
def io(num,arg,d=None): 
    if libc.ioctl(fd if d is None else d,ctypes.c_ulong(num),ctypes.create_string_buffer(arg,len(arg)))<0: raise OSError(ctypes.get_errno(),'')
    return 'ok'
CR,DE,SN=0x5000940e,0x5000940f,0x50009401
out('create',e(io,CR,va(b'sub')),e(io,CR,va(b'def')),e(io,CR,va(b'busy')))
id_=lambda n: struct.unpack('Q',bytes(_lk(n))[:8])[0]
def _lk(n):
    f=os.open(n,os.O_RDONLY); b=bytearray(4096); b[8:16]=struct.pack('Q',256); c=(ctypes.c_char*4096).from_buffer(b); libc.ioctl(f,ctypes.c_ulong(0xd0009412),c); del c; os.close(f); return b
did=id_('def'); out('setdef',e(io,0x40089413,struct.pack('Q',did)))
sub=os.open('sub',os.O_RDONLY)
for nm in b'plainfile',b'd',b'.',b'..',b'',b'a/b',b'nothing',b'def',b'x'*255,b'x'*256,b'x'*300, b'sub/':
    for num,n,pack in (CR,'create',va),(0x50009418,'create2',va2),(DE,'destroy',va),(0x5000943f,'destroy2',va2),(SN,'snap',lambda x:struct.pack('q',sub)+x.ljust(4088,b'\0')),(0x50009417,'snap2',lambda x:struct.pack('qQQ',sub,0,0)+b'\0'*32+x.ljust(4040,b'\0')):
        if nm==b'plainfile': open('plainfile','w').close()
        r=e(io,num,pack(nm)); out(n,nm[:12],len(nm),r)
        if r=='ok' and n[:2] in('cr','sn'): out('  un',e(io,DE,va(nm)))
out('rmdir def',e(os.rmdir,'def'))
f=os.open('sub',os.O_RDONLY); out('in sub ..',e(io,DE,va(b'..'),f), e(io,DE,va(b'.'),f))
f=os.open('d',os.O_RDONLY); out('in d ..',e(io,DE,va(b'..'),f), e(io,DE,va(b'.'),f))
out('setdef',e(io,0x40089413,struct.pack('Q',5)))
"#,
    );
}

/// What a subvolume was received from, as `btrfs receive` says it in the end. (Linux's own time of it was found a second before that of its caller once: its
/// clock is the coarse one, so the caller asks that.)
#[test]
fn received_subvolumes_are_told_of_as_with_the_kernel() {
    assert_as_with_the_kernel(
        r#"
def va(name): return struct.pack('q',0)+name.ljust(4088,b'\0')
def call(p,num,arg):
    f=os.open(p,os.O_RDONLY)
    try:
        b=ctypes.create_string_buffer(arg,len(arg))
        if libc.ioctl(f,ctypes.c_ulong(num),b)<0: raise OSError(ctypes.get_errno(),'')
        return b.raw
    finally: os.close(f)
def received(p,uuid,stransid=77,sec=1234567,nsec=89,flags=0,rest=b'\0'*128):
    before=int(time.clock_gettime(5)) # CLOCK_REALTIME_COARSE, which Linux stamps with: up to a tick behind the other
    b=call(p,0xc0c89425,uuid+struct.pack('QQQIIQII',stransid,1,sec,nsec,0,2,3,0)+struct.pack('Q',flags)+rest)
    st,rt,s,n,_,rs,rn,_=struct.unpack('QQQIIQII',b[16:64])
    return b[:16]==uuid,st,rt>1,s,n,before<=rs<=time.time()+1,rn<10**9,b[64:]==struct.pack('Q',flags)+rest
def told(p):
    b=call(p,0x81f8943c,b'\0'*504)
    uuids=b[296:344]; ids=struct.unpack('4Q',b[344:376]); times=[struct.unpack('QII',b[at:at+16])[:2] for at in range(376,440,16)]
    return uuids[32:].hex(),ids[2],ids[3]>1,times[2],times[3][0]>1000
out([len(call('.',0x5000940e,va(n))) for n in (b'sub',b'ro')])
os.mkdir('sub/d'); open('sub/f','w').close()
call('ro',0x4008941a,struct.pack('Q',2))
A,B=bytes(range(16)),bytes(range(16,32))
for p in 'sub','ro','sub/d','sub/f': out(p,e(received,p,A))
out(told('sub'),told('ro'))
out(e(received,'sub',A,1,2,3),told('sub'))
out(e(received,'sub',B,2**64-1,2**63,10**9-1),told('sub'))
out(e(received,'sub',B,5,6,7,9,b'x'*128),told('sub'))
out(e(received,'sub',b'\0'*16),told('sub'))
out(e(received,'sub',B),told('sub'))
call('sub',0x4008941a,struct.pack('Q',2)); out(told('sub'),e(received,'sub',A))
"#,
    );
}

/// Where the mount was shown read-only in another namespace, as to a container, subvolumes could be made and deleted: one place that can be written
/// allowed it to all.
#[test]
fn read_only_bind_mount_in_another_namespace_is_changed_by_nobody_as_with_the_kernel() {
    assert_as_with_the_kernel(
        r#"
import subprocess
top=os.getcwd()
def va(name): return struct.pack('q',0)+name.ljust(4088,b'\0')
def va2(fd,name,flags=0): return struct.pack('qQQ',fd,0,flags)+b'\0'*32+name.ljust(4040,b'\0')
def io(fd,num,arg):
    if libc.ioctl(fd,ctypes.c_ulong(num),ctypes.create_string_buffer(arg,len(arg)))<0: raise OSError(ctypes.get_errno(),'')
    return 'ok'
def changes(who,fd,name):
    out(who,'create',e(io,fd,0x5000940e,va(name)),'snapshot',e(io,fd,0x50009417,va2(src,b's'+name)))
    out(who,'flags',e(io,src if who=='before' else os.open('source',os.O_RDONLY,dir_fd=fd),0x4008941a,struct.pack('Q',0)))
    out(who,'label',e(io,fd,0x41009432,name.ljust(256,b'\0')),'default',e(io,fd,0x40089413,struct.pack('Q',5)))
    out(who,'delete',e(io,fd,0x5000940f,va(b's'+name)),e(io,fd,0x5000943f,va2(0,name)),e(io,fd,0x5000940f,va(b'old')))
    out(who,'lookup',e(io,fd,0xd0009412,struct.pack('QQ',0,256)+b'\0'*4080))
fd=os.open('.',os.O_RDONLY)
out(e(io,fd,0x5000940e,va(b'source')),e(io,fd,0x5000940e,va(b'old')))
src=os.open('source',os.O_RDONLY)
sys.stdout.flush()
def inside():
    if libc.unshare(0x20000)<0: raise OSError(ctypes.get_errno(),'')
    run=lambda *a: subprocess.run(a,check=True)
    run('mount','--make-rprivate','/')
    run('mount','-i','--bind',top,top)
    run('mount','-i','-o','remount,bind,ro',top)
    changes('read-only',os.open(top,os.O_RDONLY),b'a')
    # What was opened by the other place before.
    changes('before',fd,b'b')
    sys.stdout.flush()
pid=os.fork()
if pid==0:
    try: inside(); os._exit(0)
    finally: os._exit(1)
out(os.waitpid(pid,0)[1])
out(e(io,fd,0x5000940e,va(b'old')))
changes('outside',fd,b'c')
out(sorted(os.listdir('.')))
"#,
    );
}

/// truncate(2) to where a file ends already moved its times.
#[test]
fn truncations_move_times_as_with_the_kernel() {
    assert_as_with_the_kernel(
        r#"
def by_fd(p,size):
    fd=os.open(p,os.O_RDWR)
    try: os.ftruncate(fd,size)
    finally: os.close(fd)
def emptied(p,size): os.close(os.open(p,os.O_WRONLY|os.O_TRUNC))
def as_is(p,size): os.truncate(p,size)
keep=lambda fd: libc.fallocate(fd,1,ctypes.c_long(0),ctypes.c_long(1<<20))
def synced(p):
    fd=os.open(p,os.O_RDWR); os.fsync(fd); os.close(fd)
# What is allocated behind the end goes in any case.
for had in 1,4096,5000:
    for size in had,had+1:
        for call in as_is,by_fd:
            p='a'
            with open(p,'wb') as f: f.write(b'x'*had); f.flush(); keep(f.fileno())
            synced(p); blocks=os.stat(p).st_blocks
            os.utime(p,(1,1)); before=os.stat(p); later()
            e(call,p,size)
            after=os.stat(p); synced(p)
            out('allocated',had,size,call.__name__,blocks,os.stat(p).st_blocks,after.st_mtime==1,after.st_ctime_ns==before.st_ctime_ns)
            os.unlink(p)
for had in 0,1,5000:
    for size in 0,1,5000,9000:
        for call in as_is,by_fd,emptied:
            for m in 0o644,0o6755:
                # O_TRUNC and truncate(2) to nothing are the same to a server.
                if call is as_is and had==size==0: continue
                p='t'
                with open(p,'wb') as f: f.write(b'x'*had)
                os.chmod(p,m); os.utime(p,(1,1)); before=os.stat(p); later()
                e(call,p,size)
                after=os.stat(p)
                out(had,size,call.__name__,oct(m),after.st_size,oct(after.st_mode),after.st_mtime==1,after.st_ctime_ns==before.st_ctime_ns)
                os.unlink(p)
"#,
    );
}

/// A place before the file was one behind all files, an empty property was stored, the reading of a link was not noted, and a whiteout was root's.
#[test]
fn small_calls_end_as_with_the_kernel() {
    assert_as_with_the_kernel(
        r#"
open('s','w').write('abc'); f=os.open('s',os.O_RDWR)
for w in 3,4:
    for o in -1,-2,-2**63,2**63-1,3,2: out('lseek',w,o,e(os.lseek,f,o,w))
def fl(p):
    f=os.open(p,os.O_RDONLY); b=bytearray(8); fcntl.ioctl(f,0x80086601,b); os.close(f); return hex(struct.unpack('I',b[:4])[0])
for k in 'f3','dd':
    os.mkdir(k) if k=='dd' else open(k,'w').close()
    for pre in None,b'zlib',b'no':
        if pre: os.setxattr(k,'btrfs.compression',pre)
        out('prop ""',k,pre,e(os.setxattr,k,'btrfs.compression',b''),os.listxattr(k),fl(k), e(os.getxattr,k,'btrfs.compression'))
        out('prop "" replace',e(os.setxattr,k,'btrfs.compression',b'',2),os.listxattr(k),fl(k))
        out('prop "" create',e(os.setxattr,k,'btrfs.compression',b'',1),os.listxattr(k),fl(k))
        out('remove',e(os.removexattr,k,'btrfs.compression'))
os.setxattr('f3','btrfs.compression',b'zlib'); out('create over',e(os.setxattr,'f3','btrfs.compression',b'',1),os.listxattr('f3'))
os.mkfifo('ff'); out('fifo',e(os.setxattr,'ff','btrfs.compression',b'')); out('none val',e(os.setxattr,'f3','btrfs.compression',b'none'),e(os.getxattr,'f3','btrfs.compression'),fl('f3'))
out('x',e(os.setxattr,'f3','btrfs.compression',b'junk'),os.listxattr('f3'))
os.symlink('q','l'); a=os.lstat('l').st_atime_ns; later(); os.readlink('l'); out('readlink',os.lstat('l').st_atime_ns!=a)
a=os.lstat('l').st_atime_ns; later(); os.readlink('l'); out('readlink again',os.lstat('l').st_atime_ns!=a)
os.mkdir('g'); os.chown('g',0,77); os.chmod('g',0o2777); open('g/f','w').close(); out('wo g',e(ren,'g/f','g/h',4),os.lstat('g/f').st_gid,os.lstat('g/f').st_uid,mode('g/f'))
os.mkdir('g2');os.chown('g2',0,77);os.chmod('g2',0o777);open('g2/f','w').close();os.chown('g2/f',1000,1000)
out('wo user',as_user(lambda: ren('g2/f','g2/h',4)),os.path.lexists('g2/f') and (os.lstat('g2/f').st_uid,os.lstat('g2/f').st_gid))
"#,
    );
}

/// A new file, directory or subvolume took over the level, too, or that nothing is to be compressed.
#[test]
fn compression_is_inherited_as_with_the_kernel() {
    assert_as_with_the_kernel(
        r#"
def fl(p):
    f=os.open(p,os.O_RDONLY); b=bytearray(8); fcntl.ioctl(f,0x80086601,b); os.close(f); return hex(struct.unpack('I',b[:4])[0])
def subvolume(p,name):
    f=os.open(p,os.O_RDONLY); fcntl.ioctl(f,0x5000940e,bytearray(struct.pack('q4088s',0,name))); os.close(f)
def shown(p): return e(os.getxattr,p,'btrfs.compression'),fl(p)
for i,v in enumerate([b'zstd',b'zstd:7',b'zlib:3',b'zlib',b'lzo',b'none',b'no']):
    d='p%d'%i; os.mkdir(d); os.setxattr(d,'btrfs.compression',v)
    os.mkdir(d+'/d'); os.mkdir(d+'/d/d'); open(d+'/d/f','w').close(); os.symlink('x',d+'/l'); os.mkfifo(d+'/p')
    out(v,[shown(d+p) for p in ('','/d','/d/d','/d/f')],e(os.listxattr,d+'/p'))
    s='s%d'%i; subvolume('.',s.encode()); out('of none',shown(s)); os.setxattr(s,'btrfs.compression',v); os.mkdir(s+'/d')
    subvolume(s,b'in'); subvolume(s+'/d',b'in'); subvolume(d,b'in')
    out('subvolumes',v,[shown(p) for p in (s+'/in',s+'/d/in',d+'/in')])
"#,
    );
}
/// `chattr` came back before what it had changed was durable, though each change of attributes is promised to be.
#[test]
fn flags_are_durable_when_chattr_returns_with_sync_and_dirsync() {
    for option in ["sync", "dirsync"] {
        let Some(place) = Place::new(true) else { return };
        place.mount(&["-o", &format!("commit=3600,{option}")]);
        let file = place.directory.join("file");
        std::fs::write(&file, b"kept").unwrap();
        let output = Command::new("chattr").args(["+Ad"]).arg(&file).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        place.cut_off();
        let kernel = KernelMount::read_only(&place.image, "");
        let output = Command::new("lsattr").arg(kernel.path().join("file")).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        kernel.unmount();
        let shown = said.split(' ').next().unwrap_or_default();
        assert!(shown.contains('A') && shown.contains('d'), "{option}: {said}");
    }
}

/// The kernel of a FUSE mount does not heed the flag SYNC, and sends no fsync: what was written was lost with the power.
#[test]
fn what_is_written_to_files_with_the_flag_sync_is_durable_when_write_returns() {
    const WRITES: &str = r#"
data=open('file','rb').read(); assert data==b'before ', data
fd=os.open('file',os.O_WRONLY|os.O_APPEND); os.write(fd,b'appended '); os.write(fd,b'twice')
# Behind its end, where zeros are put into the kernel's memory before the answer.
f=os.open('file',os.O_RDWR); os.pread(f,100,0); os.pwrite(f,b'behind',30)
s=os.open('source',os.O_RDONLY); c=os.open('copy',os.O_RDWR)
assert os.copy_file_range(s,c,50000,0)==50000
"#;
    let Some(place) = Place::new(true) else { return };
    let top = &place.directory;
    place.mount(&[]);
    std::fs::write(top.join("file"), b"before ").unwrap();
    std::fs::write(top.join("copy"), b"").unwrap();
    std::fs::write(top.join("source"), [b's'; 50_000]).unwrap();
    place.umount();
    for round in 0..2 {
        // Once the flag is set just now, once it is found.
        place.mount(&["-o", "commit=3600"]);
        if round == 0 {
            let mut chattr = Command::new("chattr");
            chattr.args(["+S", "file", "copy"]).current_dir(top);
            assert!(chattr.status().unwrap().success());
        }
        fates(top, WRITES);
        place.cut_off();
        let path = |name| Path::new("/").join(name);
        let stored = place.done(&["cat"], &[&place.image, &path("file")]);
        assert_eq!(stored, "before appended twice\0\0\0\0\0\0\0\0\0behind");
        assert_eq!(place.done(&["cat"], &[&place.image, &path("copy")]), "s".repeat(50_000));
        for (name, size) in [("file", "7"), ("copy", "0")] {
            place.done(&["truncate", "-s", size], &[&place.image, &path(name)]);
        }
        place.assert_clean();
    }
}

/// As with `-o dirsync`. The kernel does not say that a directory has such a flag, either.
#[test]
fn names_in_directories_with_the_flags_sync_or_dirsync_are_durable_when_they_are_made() {
    const INTO: &str =
        "os.mkdir('dir/made'); os.symlink('to','dir/link'); os.rename('moved','dir/moved')";
    const WITHIN: &str =
        "os.rename('moved','dir/moved'); os.mkdir('dir/made'); os.symlink('to','dir/link')";
    for (flag, script) in [("+S", INTO), ("+D", WITHIN)] {
        let Some(place) = Place::new(true) else { return };
        let top = &place.directory;
        place.mount(&["-o", "commit=3600"]);
        std::fs::create_dir(top.join("dir")).unwrap();
        std::fs::write(top.join("moved"), b"").unwrap();
        let output = Command::new("chattr").arg(flag).arg(top.join("dir")).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        fates(top, &format!("\n{script}"));
        place.cut_off();
        let found = ["/", "/dir"].map(|dir| place.done(&["ls"], &[&place.image, Path::new(dir)]));
        assert_eq!(found, ["dir\n", "link\nmade\nmoved\n"], "{flag}");
        place.assert_clean();
    }
}

/// What was opened so that its time of access stays had it noted all the same.
#[test]
fn time_of_access_stays_for_who_asks_for_that_as_with_the_kernel() {
    assert_as_with_the_kernel(
        r#"
for flag,way in (os.O_NOATIME,'noatime'),(0,'atime'):
    # Not all within a tick of the kernel's clock.
    f=open('f'+way,'w'); later(); f.write('data'); f.close()
    os.mkdir('d'+way)
    fd=os.open('f'+way,os.O_RDWR); os.fsync(fd); os.posix_fadvise(fd,0,0,os.POSIX_FADV_DONTNEED); os.close(fd)
    later()
    for p,read in ('f',lambda fd: os.read(fd,10)),('d',os.listdir):
        before=os.stat(p+way).st_atime_ns
        fd=os.open(p+way,os.O_RDONLY|flag); read(fd); os.close(fd)
        out(p,way,os.stat(p+way).st_atime_ns!=before)
"#,
    );
}

/// A mount that had become read-only noted who read what, and so wrote to the image.
#[test]
fn reading_a_mount_that_has_become_read_only_changes_nothing() {
    let Some(place) = Place::new(true) else { return };
    let top = &place.directory;
    let generation = || {
        let output = Command::new("btrfs")
            .args(["inspect-internal", "dump-super"])
            .arg(&place.image)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        said.lines().find(|line| line.starts_with("generation")).unwrap().to_owned()
    };
    place.mount(&["-o", "relatime"]);
    std::fs::create_dir(top.join("dir")).unwrap();
    std::fs::write(top.join("dir/file"), b"data").unwrap();
    std::os::unix::fs::symlink("dir/file", top.join("link")).unwrap();
    for noted in ["remount,ro", "remount,bind,ro"] {
        std::fs::write(top.join(noted), b"data").unwrap();
    }
    place.umount();
    for how in ["remount,ro", "remount,bind,ro"] {
        place.mount(&["-o", "relatime"]);
        // Whoever answers has found it writable before.
        let unread = generation();
        std::fs::read(top.join(how)).unwrap();
        place.done(&["filesystem", "sync"], &[top]);
        assert_ne!(generation(), unread, "{how}");
        let output = Command::new("mount").args(["-i", "-o", how]).arg(top).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let before = generation();
        let said = fates(top, "\nout(os.listdir('dir'),os.readlink('link'),open('link').read())");
        assert_eq!(said, ["['file'] dir/file data"]);
        place.umount();
        assert_eq!(generation(), before, "{how}");
    }
    // Else it is noted.
    place.mount(&["-o", "relatime"]);
    let before = generation();
    std::fs::read(top.join("dir/file")).unwrap();
    place.umount();
    assert_ne!(generation(), before);
    place.assert_clean();
}

/// Of six at once one could be refused with EBUSY, where the kernel had much to write that was stored to maps. By rings they are yet.
#[test]
fn snapshots_by_ioctl_at_once_beside_stores_to_a_map_are_all_made() {
    const SCRIPT: &str = r#"
import mmap,threading
LEN=64<<20
with open('file','wb') as f: f.truncate(LEN)
def store():
    fd=os.open('file',os.O_RDWR); m=mmap.mmap(fd,LEN); os.write(w,b'.'); byte=0
    while True:
        byte=(byte+1)%256
        for at in range(0,LEN,4096): m[at]=byte
r,w=os.pipe()
pid=os.fork()
if pid==0:
    try: store()
    finally: os._exit(1)
os.read(r,1)
fd=os.open('.',os.O_RDONLY); fates=[]
def snapshot(number):
    for turn in range(2):
        name=b'snapshot %d %d'%(number,turn)
        arg=struct.pack('q',fd)+name.ljust(4088,b'\0')
        def io():
            if libc.ioctl(fd,ctypes.c_ulong(0x50009401),ctypes.create_string_buffer(arg,len(arg)))<0: raise OSError(ctypes.get_errno(),'')
        fates.append(e(io))
threads=[threading.Thread(target=snapshot,args=(number,)) for number in range(6)]
[t.start() for t in threads]; [t.join() for t in threads]
os.kill(pid,9); os.waitpid(pid,0)
out(sorted(fates))
"#;
    let Some(place) = Place::new(true) else { return };
    // So that all of them have room.
    place.mount(&["-o", "compress"]);
    assert_eq!(fates(&place.directory, SCRIPT), [format!("{:?}", ["ok"; 12]).replace('"', "'")]);
    place.umount();
    place.assert_clean();
}

/// Whoever did not stat it first read nothing behind its old end, and had SIGBUS from a map.
#[test]
fn file_that_a_command_makes_longer_is_as_long_for_who_has_it_open() {
    const SCRIPT: &str = r#"
libc.mmap.restype=ctypes.c_void_p
os.chdir(sys.argv[1])
fd=os.open('file',os.O_RDONLY)
at=libc.mmap(None,ctypes.c_size_t(65536),1,1,fd,ctypes.c_long(0))
out('begin',ctypes.string_at(at,10))
sys.stdout.flush()
sys.stdin.readline()
to=os.open(sys.argv[1]+'.copy',os.O_RDWR|os.O_CREAT)
out('sent',os.sendfile(to,fd,0,100000))
made=os.open('made',os.O_RDWR|os.O_CREAT)
out('copied',os.copy_file_range(fd,made,100000,0))
size=os.pread(fd,100000,0)
out('mapped',ctypes.string_at(at+8,2),ctypes.string_at(at,len(size))==b'0123456789'+bytes(len(size)-10))
out('read',len(os.pread(fd,100000,0)))
"#;
    // The second one's last byte is alone in its page, and the third one's in that of the old end.
    for end in [50_000, 53_249, 4000] {
        let Some(place) = Place::new(true) else { return };
        place.mount(&[]);
        std::fs::write(place.directory.join("file"), "0123456789").unwrap();
        let mut program = Command::new("python3");
        program.args(["-c", &format!("{HEAD}{SCRIPT}")]).arg(&place.directory);
        let mut program = program.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut said = BufReader::new(program.stdout.take().unwrap());
        let mut line = String::new();
        said.read_line(&mut line).unwrap();
        let size = end.to_string();
        place.done(&["truncate", "-s", &size], &[&place.directory, Path::new("/file")]);
        drop(program.stdin.take());
        line.clear();
        said.read_to_string(&mut line).unwrap();
        let status = program.wait().unwrap();
        let expected = format!("sent {end}\ncopied {end}\nmapped b'89' True\nread {end}\n");
        assert!(status.success() && line == expected, "{end}: {status}, {line}");
        place.umount();
        place.assert_clean();
    }
}
