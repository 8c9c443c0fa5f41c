//! Requests that wait for the kernel beside many others: the mount goes on.

use crate::fates::fates;
use crate::place::Place;

/// As soon as four processes made or deleted subvolumes where others made files, all waited for a second at a time: for the directory's lock, whose holder
/// waited for an answer. In 8 seconds there were 4 to 11 rounds, and one or two files.
#[test]
fn subvolumes_are_made_and_deleted_in_a_directory_where_files_are_made() {
    const SCRIPT: &str = r#"
CR,DE=0x5000940e,0x5000940f
SECONDS=6
def subvolumes(number,until):
    fd=os.open('.',os.O_RDONLY); name=b'sub %d'%number; arg=struct.pack('q',0)+name.ljust(4088,b'\0'); rounds=0
    while time.monotonic()<until:
        for command in CR,DE:
            if libc.ioctl(fd,ctypes.c_ulong(command),ctypes.create_string_buffer(arg,len(arg)))<0: raise OSError(ctypes.get_errno(),'')
            # It is known when that returns.
            assert os.path.isdir(name)==(command==CR)
        rounds+=1
    return rounds
def files(number,until):
    name='file %d'%number; rounds=0
    while time.monotonic()<until:
        os.close(os.open(name,os.O_CREAT|os.O_WRONLY)); os.unlink(name); rounds+=1
    return rounds
def begin(work,number,until):
    r,w=os.pipe(); pid=os.fork()
    if pid: os.close(w); return pid,r
    try: os.write(w,str(work(number,until)).encode())
    except BaseException as x: os.write(w,repr(x).encode())
    finally: os._exit(0)
def end(one):
    said=os.read(one[1],1000).decode(); os.waitpid(one[0],0); return int(said)
until=time.monotonic()+SECONDS
all_=[[begin(work,number,until) for number in range(count)] for work,count in ((subvolumes,6),(files,3))]
made,opened=[[end(one) for one in some] for some in all_]
out(sum(made)>=40 and min(opened)>=20 or (made,opened))
"#;
    let Some(place) = Place::new(true) else { return };
    place.mount(&[]);
    assert_eq!(fates(&place.directory, SCRIPT), ["True"]);
    place.umount();
    place.assert_clean();
}

/// As soon as four were to be closed to changes of which the kernel held much, they were refused with EBUSY after a second, in which nobody else was answered
/// either.
#[test]
fn files_that_a_map_was_stored_to_are_closed_to_changes_all_at_once() {
    const SCRIPT: &str = r#"
import mmap
# Of more the kernel writes some before.
LEN=1<<20
def chattr(number):
    fd=os.open('file %d'%number,os.O_RDONLY); os.close(go); os.read(wait,1)
    try: fcntl.ioctl(fd,0x40086602,struct.pack('Q',(0x10,0x20)[number%2])); said='ok'
    except OSError as x: said=errno.errorcode[x.errno]
    os.write(w,b'%-10s'%said.encode())
for turn in range(4):
    maps=[]
    for number in range(8):
        fd=os.open('file %d'%number,os.O_RDWR|os.O_CREAT|os.O_TRUNC); os.ftruncate(fd,LEN); maps.append(mmap.mmap(fd,LEN)); os.close(fd)
    r,w=os.pipe(); wait,go=os.pipe(); pids=[]
    for m in maps:
        for at in range(0,LEN,4096): m[at]=turn+1
    for number in range(len(maps)):
        pid=os.fork()
        if pid==0:
            try: chattr(number)
            finally: os._exit(0)
        pids.append(pid)
    # All at once.
    os.close(go)
    for pid in pids: os.waitpid(pid,0)
    out(os.read(r,1000).decode().split())
    for number in range(len(maps)):
        setfl('file %d'%number,0); maps[number].flush()
        with open('file %d'%number,'rb') as f: assert f.read()==(bytes([turn+1])+bytes(4095))*(LEN>>12)
    [os.close(fd) for fd in (r,w,wait)]
"#;
    let Some(place) = Place::new(true) else { return };
    place.mount(&[]);
    let all_are_done = format!("{:?}", ["ok"; 8]).replace('"', "'");
    assert_eq!(fates(&place.directory, SCRIPT), [all_are_done.as_str(); 4]);
    place.umount();
    place.assert_clean();
}
