use super::*;
use crate::Prng;

const NOW: Timestamp = Timestamp { sec: 100, nsec: 0 };
const BORN: Timestamp = Timestamp { sec: 50, nsec: 7 };

fn new(mode: u32) -> New {
    New { mode, uid: 1, gid: 2, rdev: 3, atime: BORN, mtime: BORN, ctime: BORN, otime: BORN }
}

fn empty() -> Model {
    Model::new(&new(0o040_755), Limits::of_nodesize(16_384), NOW)
}

#[test]
fn model_refuses_as_a_filesystem_does() {
    let mut model = empty();
    let top = Id::root_of(TOP_LEVEL);
    let dir = model.create(top, b"dir", &new(0o040_700), 257).unwrap();
    let file = model.create(dir, b"file", &new(0o100_600), 258).unwrap();
    let refused = |result: Result<Id>| result.unwrap_err();
    assert_eq!(refused(model.create(dir, b"file", &new(0o100_600), 0)), Refusal::Exists);
    assert_eq!(refused(model.create(file, b"x", &new(0o100_600), 0)), Refusal::NotDirectory);
    assert_eq!(refused(model.create(dir, b"a/b", &new(0o100_600), 0)), Refusal::InvalidArgument);
    assert_eq!(refused(model.create(dir, &[b'x'; 256], &new(0o100_600), 0)), Refusal::TooLong);
    assert_eq!(refused(model.create(dir, b"x", &new(0o120_777), 0)), Refusal::InvalidArgument);
    let gone = Id { root: TOP_LEVEL, inode: 999 };
    assert_eq!(refused(model.create(gone, b"x", &new(0o100_600), 0)), Refusal::NotFound);
    assert_eq!(model.link(top, b"x", dir), Err(Refusal::IsDirectory));
    assert_eq!(model.unlink(top, b"dir"), Err(Refusal::IsDirectory));
    assert_eq!(model.unlink(file, b"x"), Err(Refusal::NotFound));
    let before = model.clone();
    model.link(top, b"second", file).unwrap();
    assert_ne!(model, before);
    assert_eq!(model.unlink(dir, b"file"), Ok(None));
    assert_eq!(model.node(file).unwrap().nlink, 1);
    assert_eq!(model.unlink(top, b"second"), Ok(Some(file)));
    model.evict(file).unwrap();
    assert_eq!((model.node(file), model.node_count()), (None, 2));
    assert_eq!(before.node(file).unwrap().mtime, BORN, "a clone is apart");
    assert_eq!(model.node(dir).unwrap().mtime, NOW);
}

/// A file that was longer than the operations knew, as some before had failed, took what the engine refuses.
#[test]
fn append_before_the_end_is_refused() {
    let mut model = empty();
    let file = model.create(Id::root_of(TOP_LEVEL), b"file", &new(0o100_600), 257).unwrap();
    let piece = |offset, len| [Piece { offset, bytes: vec![1; len] }];
    assert_eq!(model.append(file, &piece(1, 9), 10), Err(Refusal::InvalidArgument));
    assert_eq!(model.append(file, &piece(0, 9), 8), Err(Refusal::InvalidArgument));
    model.append(file, &piece(0, 9), 4096).unwrap();
    assert_eq!(model.append(file, &piece(0, 9), 9000), Err(Refusal::InvalidArgument));
    model.append(file, &piece(4096, 9), 9000).unwrap();
    assert_eq!(model.append(file, &piece(12_288, 9), 20_000), Err(Refusal::Unsupported));
}

#[test]
fn sparse_bytes_random_changes_are_those_of_a_vector() {
    let mut prng = Prng::new(5);
    let (mut sparse, mut plain) = (SparseBytes::default(), Vec::new());
    for _ in 0..500 {
        let (at, len) = (prng.index(30_000), prng.index(9000));
        let end = at + len;
        match prng.below(4) {
            0 => {
                sparse.resize(at as u64);
                plain.resize(at, 0);
            }
            1 => {
                sparse.zero(at as u64, len as u64);
                let end = end.min(plain.len());
                if at < end {
                    plain[at..end].fill(0);
                }
            }
            _ => {
                let bytes = prng.bytes(len);
                sparse.write(at as u64, &bytes);
                if len > 0 && plain.len() < end {
                    plain.resize(end, 0);
                }
                if len > 0 {
                    plain[at..end].copy_from_slice(&bytes);
                }
            }
        }
        assert_eq!(sparse.len_bytes(), plain.len() as u64);
        let mut read = vec![1; plain.len()];
        sparse.read(0, &mut read);
        assert!(read == plain);
        let mut other = SparseBytes::default();
        other.write(0, &plain);
        assert_eq!(other, sparse);
        let mut copy = SparseBytes::default();
        copy.copy_from(0, &sparse, 0, plain.len() as u64);
        assert_eq!(copy, sparse);
    }
}

#[test]
fn rename_moves_replaces_and_exchanges() {
    let mut model = empty();
    let top = Id::root_of(TOP_LEVEL);
    let one = model.create(top, b"one", &new(0o040_755), 257).unwrap();
    let two = model.create(one, b"two", &new(0o040_755), 258).unwrap();
    let file = model.create(top, b"file", &new(0o100_644), 259).unwrap();
    fn at(dir: Id, name: &[u8]) -> Place<'_> {
        Place { dir, name }
    }
    let into_itself = model.rename(at(top, b"one"), at(two, b"x"), RenameMode::Replace, 0);
    assert_eq!(into_itself, Err(Refusal::InvalidArgument));
    let over = model.rename(at(top, b"file"), at(one, b"two"), RenameMode::Replace, 0);
    assert_eq!(over, Err(Refusal::IsDirectory));
    let above = model.rename(at(one, b"two"), at(top, b"one"), RenameMode::Replace, 0);
    assert_eq!(above, Err(Refusal::NotEmpty));
    let exchanged = model.rename(at(top, b"file"), at(one, b"two"), RenameMode::Exchange, 0);
    assert_eq!(exchanged, Ok(None));
    assert_eq!((model.parent(two), model.named(one, b"two").is_some()), (Some(top), true));
    let other = model.create(one, b"other", &new(0o100_644), 260).unwrap();
    let replaced = model.rename(at(one, b"two"), at(one, b"other"), RenameMode::Whiteout, 261);
    assert_eq!(replaced, Ok(Some(other)));
    assert_eq!(model.node(Id { root: TOP_LEVEL, inode: 261 }).unwrap().mode, 0o020_000);
    assert_eq!(model.node(file).unwrap().nlink, 1);
}

#[test]
fn snapshot_is_apart_and_holds_the_place_of_what_was_nested() {
    let mut model = empty();
    let top = Id::root_of(TOP_LEVEL);
    let nested = model.create_subvolume(top, b"nested", &new(0o755), 300).unwrap();
    let inside = model.create_subvolume(nested, b"inside", &new(0o755), 301).unwrap();
    let snapshot = model.snapshot(300, top, b"snapshot", true, 302).unwrap();
    assert_eq!(model.subvolume_at(snapshot, b"inside", inside.root), None);
    let refused = model.create(snapshot, b"x", &new(0o100_644), 400);
    assert_eq!(refused, Err(Refusal::ReadOnly));
    assert_eq!(model.delete_subvolume(top, b"nested"), Err(Refusal::NotEmpty));
    model.delete_subvolume(nested, b"inside").unwrap();
    model.delete_subvolume(top, b"nested").unwrap();
    assert_eq!(model.subvolumes().keys().copied().collect::<Vec<_>>(), [5, 302]);
    assert_eq!(model.tree().entries.len(), 3);
}
