//! What programs write past the kernel's cache without waiting for it, as databases and virtual machines do: by libaio, of which the kernel's FUSE does less
//! behind it than behind a write that is waited for.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::place::Place;

/// The calls of libaio, for the two functions below it. A write is of one page, at one.
const CALLS: &str = "
import ctypes,mmap,os,sys,threading
from ctypes import c_int16,c_int64,c_long,c_uint16,c_uint32,c_uint64,c_ulong
setup,getevents,submit=(206,208,209) if os.uname().machine=='x86_64' else (0,4,2)
call=ctypes.CDLL(None,use_errno=True).syscall
call.restype=c_long
class Iocb(ctypes.Structure):
    _fields_=[('data',c_uint64),('key',c_uint32),('rw_flags',c_uint32),('opcode',c_uint16),('reqprio',c_int16),('fd',c_uint32),
        ('buf',c_uint64),('nbytes',c_uint64),('offset',c_int64),('reserved2',c_uint64),('flags',c_uint32),('resfd',c_uint32)]
class Event(ctypes.Structure): _fields_=[('data',c_uint64),('obj',c_uint64),('res',c_int64),('res2',c_int64)]
def checked(result,expected):
    if result!=expected: raise OSError(ctypes.get_errno(),'%d, not %d'%(result,expected))
context=c_ulong(0)
checked(call(setup,8,ctypes.byref(context)),0)
page=mmap.mmap(-1,4096)
address=ctypes.addressof(ctypes.c_char.from_buffer(page))
def begin(fd,byte,at):
    page[:]=bytes([byte])*4096
    request=Iocb(opcode=1,fd=fd,buf=address,nbytes=4096,offset=at)
    checked(call(submit,context,c_long(1),ctypes.byref(ctypes.pointer(request))),1)
    return request
def end():
    event=Event()
    checked(call(getevents,context,c_long(1),c_long(1),ctypes.byref(event),None),1)
    checked(event.res,4096)
name=sys.argv[1]
";

fn run(script: &str, file: &Path) {
    let mut command = Command::new("python3");
    let output = command.arg("-c").arg(format!("{CALLS}{script}")).arg(file).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

/// Behind a write that is not waited for the kernel sends no FSYNC, whatever the file was opened with.
#[test]
fn write_with_dsync_that_is_not_waited_for_is_durable_when_it_has_ended() {
    let Some(place) = Place::new(true) else { return };
    place.mount(&["-o", "commit=3600"]);
    let script = "
fd=os.open(name,os.O_RDWR|os.O_CREAT,0o666)
os.write(fd,bytes([1])*65536)
os.fsync(fd)
fd=os.open(name,os.O_RDWR|os.O_DIRECT|os.O_DSYNC)
begin(fd,2,8192)
end()
";
    run(script, &place.directory.join("file"));
    place.cut_off();
    let found = place.done(&["cat"], &[&place.image, Path::new("/file")]).into_bytes();
    let mut expected = vec![1; 65536];
    expected[8192..12288].fill(2);
    assert!(found == expected, "{} bytes", found.len());
    place.assert_clean();
}

/// The kernel forgets what it has of the place before such a write, and not behind it: who read there in the meantime left old data in the kernel's memory
/// for as long as that had room.
#[test]
fn write_that_is_not_waited_for_is_seen_by_all_who_read_when_it_has_ended() {
    let Some(place) = Place::new(true) else { return };
    place.mount(&[]);
    let file = place.directory.join("file");
    fs::write(&file, [0; 65536]).unwrap();
    run(
        "
fd=os.open(name,os.O_RDWR|os.O_DIRECT)
other=os.open(name,os.O_RDONLY)
over=False
def look():
    while not over: os.pread(other,4096,8192)
looking=[threading.Thread(target=look) for _ in range(2)]
[thread.start() for thread in looking]
stale=[]
for n in range(3000):
    begin(fd,n%251+1,8192)
    os.pread(other,4096,8192)
    end()
    if os.pread(other,4096,8192)!=page[:]: stale.append(n)
over=True
[thread.join() for thread in looking]
assert not stale,'%d: %r'%(len(stale),stale[:5])
",
        &file,
    );
    place.umount();
    place.assert_clean();
}
