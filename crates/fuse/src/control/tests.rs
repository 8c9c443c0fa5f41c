//! The socket, its commands and their answers.

use super::*;

#[test]
fn users_outside_of_a_namespace_are_found() {
    assert_eq!(outside("         0          0 4294967295\n", 7), 7);
    let map = "0 1000 1\n1 100000 65536\n";
    assert_eq!([0, 1, 5].map(|uid| outside(map, uid)), [1000, 100_000, 100_004]);
    for (map, uid) in [("", 3), ("0 1000 1", 3), ("x y z\n1 2", 3), ("0 4294967295 9", 3)] {
        assert_eq!(outside(map, uid), uid, "{map}");
    }
}

#[test]
fn words_come_back_and_what_is_cut_or_too_long_is_refused() {
    let mut bytes = Vec::new();
    let words: [&[u8]; 3] = [b"subvolume", b"", b"\xff\0x"];
    let len_bytes = words.iter().map(|word| word.len() + STRING_OWN_BYTES).sum();
    say_words(&mut bytes, &words.map(|word| OsString::from_vec(word.to_vec()))).unwrap();
    assert_eq!(read_words(&mut &bytes[..], len_bytes).unwrap(), words);
    assert!(read_words(&mut &bytes[..], len_bytes - 1).is_err());
    for len in 0..bytes.len() {
        assert!(read_words(&mut &bytes[..len], len_bytes).is_err(), "{len}");
    }
    assert!(read_words(&mut &[255; 100][..], usize::MAX).is_err());
    let claims_much = [1, 0, 0, 0, 255, 255, 255, 255, 7];
    assert!(read_words(&mut &claims_much[..], usize::MAX).is_err());
    let claims_many = [&[255; 4][..], &[0; 4000]].concat();
    assert!(read_words(&mut &claims_many[..], 2000).is_err());
    let error = say_words(&mut bytes, &vec![OsString::new(); 1 << 20]).unwrap_err();
    assert!(error.to_string().ends_with("8 MiB can be said at once"), "{error}");
}

/// What an answer has in it, up to its end.
fn heard(mut bytes: &[u8]) -> io::Result<(u8, Vec<u8>)> {
    let mut all = Vec::new();
    let exit = hear_answer(&mut bytes, |said| {
        let (Said::Output(piece) | Said::Errors(piece)) = said;
        all.extend_from_slice(piece);
        Ok(())
    })?;
    Ok((exit, all))
}

#[test]
fn answers_come_in_pieces_and_what_is_none_or_cut_is_refused() {
    let (mut from, to) = UnixStream::pair().unwrap();
    let saying = std::thread::spawn(move || {
        let mut caller = Caller::new(to, PATIENCE);
        caller.say(Said::Output(&[b'x'; PIECE_BYTES_MAX + 1])).unwrap();
        caller.say(Said::Output(b"")).unwrap();
        caller.say(Said::Errors(b"y")).unwrap();
        caller.end(7).unwrap();
    });
    let mut bytes = Vec::new();
    from.read_to_end(&mut bytes).unwrap();
    saying.join().unwrap();
    let (exit, said) = heard(&bytes).unwrap();
    assert_eq!((exit, said.len(), said.last()), (7, PIECE_BYTES_MAX + 2, Some(&b'y')));
    for len in [0, 3, 5, PIECE_BYTES_MAX, bytes.len() - 1] {
        let error = heard(&bytes[..len]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{len}");
    }
    // The last is one of an earlier version.
    let bad: [&[u8]; 5] = [
        &[EXIT, 0, 0, 0, 0],
        &[EXIT, 2, 0, 0, 0, 1, 1],
        &[9, 0, 0, 0, 0],
        &[OUTPUT, 1, 0, 1, 0],
        &[3, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ];
    for bytes in bad {
        assert_eq!(heard(bytes).unwrap_err().kind(), io::ErrorKind::InvalidData, "{bytes:?}");
    }
}

/// Who takes nothing is waited for once, whatever there is yet to be said.
#[test]
fn caller_who_takes_nothing_is_waited_for_no_longer_than_said() {
    let (from, to) = UnixStream::pair().unwrap();
    let mut caller = Caller::new(to, Duration::from_millis(300));
    let begun = Instant::now();
    let piece = [0; PIECE_BYTES_MAX];
    let result = (0..10_000).try_for_each(|_| caller.say(Said::Output(&piece)));
    assert!(result.is_err());
    assert!(caller.say(Said::Errors(b"more")).is_err());
    assert!(caller.end(0).is_err());
    assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
    let (gone, to) = UnixStream::pair().unwrap();
    drop((from, gone));
    let mut caller = Caller::new(to, PATIENCE);
    let error = caller.say(Said::Output(&piece)).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
}

#[test]
fn commands_reach_who_serves_until_it_closes() {
    let device = format!("test:{}", std::process::id());
    let socket = Arc::new(ControlSocket::bind(&device).unwrap());
    let uid = rustix::process::geteuid().as_raw();
    let serving = serve_control(&socket, |words, mut caller| {
        let said = words.concat_bytes();
        // Who hears nothing more has gone.
        let _ = caller.say(Said::Output(&said));
        let _ = caller.say(Said::Errors(b"said"));
        let _ = caller.end(u8::try_from(words.len()).unwrap());
    })
    .unwrap();
    let control = |words: &[OsString]| control_within(uid, &device, words, PATIENCE);
    for words in [&["a", "b"][..], &[], &["\u{e9}"]] {
        let words: Vec<OsString> = words.iter().map(OsString::from).collect();
        let answer = control(&words).unwrap();
        assert_eq!(usize::from(answer.exit), words.len());
        assert_eq!(answer.output, words.concat_bytes());
        assert_eq!(answer.errors, b"said");
    }
    // Who says nothing of sense keeps nobody else from being heard.
    UnixStream::connect(&control_paths(uid, &device)[0]).unwrap().write_all(&[255; 8]).unwrap();
    assert_eq!(control(&["x".into()]).unwrap().exit, 1);
    let mode = std::fs::symlink_metadata(&control_paths(uid, &device)[0]).unwrap().mode();
    assert_eq!(mode & 0o777, 0o600);
    socket.close();
    serving.join().unwrap();
    let refused = control(&[]).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::NotFound);
}

/// Who sent a byte now and then was listened to for as long as he liked: the mount did not end, and nobody else was heard.
#[test]
fn words_that_trickle_in_keep_neither_the_end_nor_others_waiting() {
    let device = format!("test:slow:{}", std::process::id());
    let socket = Arc::new(ControlSocket::bind(&device).unwrap());
    let serving = serve_control(&socket, |_, _| ()).unwrap();
    let uid = rustix::process::geteuid().as_raw();
    let mut slow = UnixStream::connect(&control_paths(uid, &device)[0]).unwrap();
    slow.write_all(&[1, 0, 0]).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    let begun = Instant::now();
    socket.close();
    serving.join().unwrap();
    assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
    let (mut from, mut to) = UnixStream::pair().unwrap();
    let sending = std::thread::spawn(move || {
        let mut words = [&u32::to_le_bytes(1)[..], &u32::to_le_bytes(1 << 19)].concat();
        words.resize(1 << 19, b'x');
        words.iter().all(|byte| {
            std::thread::sleep(Duration::from_millis(20));
            to.write_all(&[*byte]).is_ok()
        })
    });
    let begun = Instant::now();
    let until = &mut Until::within(&mut from, Duration::from_millis(300));
    assert!(read_words(until, COMMAND_BYTES_MAX).is_err());
    assert!(until.write_all(&[0; 1 << 20]).is_err());
    assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
    drop(from);
    assert!(!sending.join().unwrap());
}

/// It ends when the process does, not when it listens no more.
#[test]
fn process_that_serves_is_waited_for_until_it_ends() {
    let device = format!("test:process:{}", std::process::id());
    let socket = ControlSocket::bind(&device).unwrap();
    let uid = rustix::process::geteuid().as_raw();
    let process = ServingProcess::of_mount(uid, &device).unwrap();
    socket.close();
    assert!(!process.wait(Duration::from_millis(50)).unwrap());
    assert!(ServingProcess::of_mount(uid, &device).is_err());
    let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    let pid = rustix::process::Pid::from_child(&child);
    let process = ServingProcess(rustix::process::pidfd_open(pid, PidfdFlags::empty()).unwrap());
    assert!(!process.wait(Duration::ZERO).unwrap());
    child.kill().unwrap();
    assert!(process.wait(Duration::from_secs(20)).unwrap());
    child.wait().unwrap();
}

/// Whoever ended late took away the socket of the next mount that had his device number, which no command reached any more.
#[test]
fn socket_of_the_next_mount_stays_when_an_earlier_one_closes() {
    let device = format!("test:next:{}", std::process::id());
    let uid = rustix::process::geteuid().as_raw();
    let earlier = ControlSocket::bind(&device).unwrap();
    let next = Arc::new(ControlSocket::bind(&device).unwrap());
    let serving = serve_control(&next, |_, caller| drop(caller.end(0))).unwrap();
    earlier.close();
    let answered = control_within(uid, &device, &[], PATIENCE).map_err(|error| error.kind());
    next.close();
    serving.join().unwrap();
    assert_eq!(answered, Ok(ControlAnswer::default()));
    assert!(!control_paths(uid, &device)[0].exists());
}

/// A link to another socket led to who serves that: root, who was believed whoever was asked for.
#[test]
fn nobody_is_asked_but_by_a_socket_of_the_users_own() {
    let device = format!("test:link:{}", std::process::id());
    let uid = rustix::process::geteuid().as_raw();
    let socket = ControlSocket::bind(&device).unwrap();
    let path = control_paths(uid, &device).swap_remove(0);
    let link = path.with_extension("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    let file = path.with_extension("file");
    std::fs::write(&file, b"").unwrap();
    let scratch = tempfile::tempdir().unwrap();
    let directory = scratch.path().join("directory");
    std::os::unix::fs::symlink(path.parent().unwrap(), &directory).unwrap();
    let through = directory.join(path.file_name().unwrap());
    let refused = [&link, &file, &through].map(|path| connect_at(path, uid, PATIENCE).unwrap_err());
    let of_another = connect_at(&path, uid + 1, PATIENCE).unwrap_err();
    let reached = connect_at(&path, uid, PATIENCE);
    for path in [link, file] {
        std::fs::remove_file(path).unwrap();
    }
    socket.close();
    for error in refused.iter().chain([&of_another]) {
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{error}");
    }
    reached.unwrap();
}

/// The thread that takes commands ended while others were listened to: each later command at the mount waited for ever.
#[test]
fn command_that_panics_is_told_of_and_others_are_answered() {
    let device = format!("test:panic:{}", std::process::id());
    let socket = Arc::new(ControlSocket::bind(&device).unwrap());
    let uid = rustix::process::geteuid().as_raw();
    let serving = serve_control(&socket, |words, caller| {
        assert!(words != ["x"], "as the test has it");
        let _ = caller.end(0);
    })
    .unwrap();
    let control = |word: &str| control_within(uid, &device, &[word.into()], PATIENCE);
    for _ in 0..2 {
        let answer = control("x").unwrap();
        assert_eq!(answer.exit, PANICKED_EXIT);
        assert_eq!(answer.errors, PANICKED.as_bytes());
        assert_eq!(control("y").unwrap(), ControlAnswer::default());
    }
    socket.close();
    serving.join().unwrap();
}

/// Who listened and took nobody, with as many waiting as he let wait, had whoever connects wait without end, whatever his patience.
#[test]
fn who_listens_and_takes_nobody_is_waited_for_no_longer_than_said() {
    let device = format!("test:full:{}", std::process::id());
    let socket = ControlSocket::bind(&device).unwrap();
    let uid = rustix::process::geteuid().as_raw();
    let path = control_paths(uid, &device).swap_remove(0);
    // What the system lets wait is counted anew.
    for one in &socket.bound {
        rustix::net::listen(&one.listener, 0).unwrap();
    }
    let mut waiting = Vec::new();
    let full = loop {
        match connect_at(&path, uid, Duration::ZERO) {
            Ok(stream) => waiting.push(stream),
            Err(error) => break error,
        }
    };
    let refused = [
        control_within(uid, &device, &[], Duration::from_millis(50)).unwrap_err(),
        ServingProcess::of_mount(uid, &device).unwrap_err(),
        full,
    ];
    // One who goes makes room.
    drop(waiting);
    let (stream, _) = socket.bound[0].listener.accept().unwrap();
    drop(stream);
    let again = connect_at(&path, uid, Duration::ZERO);
    socket.close();
    for error in refused {
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "{error}");
    }
    again.unwrap();
}

trait ConcatBytes {
    fn concat_bytes(&self) -> Vec<u8>;
}

impl ConcatBytes for [OsString] {
    fn concat_bytes(&self) -> Vec<u8> {
        self.iter().flat_map(|word| word.as_bytes().to_vec()).collect()
    }
}
