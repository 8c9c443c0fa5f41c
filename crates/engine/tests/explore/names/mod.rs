//! Names, directories and subvolumes: what two calls make of them beside each other, and what is seen meanwhile.

mod changes;
mod looks;
mod world;

use std::collections::BTreeSet;
use std::sync::Arc;

use shuttle::rand::Rng;
use ubtrfs_engine::InodeId;
use ubtrfs_testkit::crash::Image;

use self::changes::{CHANGES, Change};
use self::looks::{LOOKS, listed};
use self::world::{Names, Tree, answer_if_any, tree_of};
use crate::world::{Opened, check};
use crate::{ToldOfPanic, each, explore, runs};

type Named = (&'static str, Change);

/// Where nothing fails.
fn done(names: &Names, change: Change) -> String {
    try_it(names, change).expect("nothing fails")
}

/// `None` if something failed.
fn try_it(names: &Names, change: Change) -> Option<String> {
    answer_if_any(change(names), |()| "done".to_owned())
}

/// What is there after these, one behind the other, and what each of them answered.
fn after(start: &Image, changes: &[Change]) -> (Vec<Option<String>>, Tree) {
    let names = Names::open(start);
    let answers = changes.iter().map(|change| Some(done(&names, *change))).collect();
    (answers, tree_of(&names.fs))
}

struct Case {
    start: Image,
    name: String,
    changes: [Change; 2],
    ends: [(Vec<Option<String>>, Tree); 2],
    moments: Vec<Tree>,
}

impl Case {
    fn new(start: &Image, [one, other]: [Named; 2]) -> Self {
        let (then, mut first) = (after(start, &[one.1, other.1]), after(start, &[other.1, one.1]));
        first.0.reverse();
        let before: [&[Change]; 3] = [&[], &[one.1], &[other.1]];
        let before = before.map(|changes| after(start, changes).1);
        let moments = before.into_iter().chain([then.1.clone(), first.1.clone()]).collect();
        Self {
            start: start.clone(),
            name: format!("{} beside {}", one.0, other.0),
            changes: [one.1, other.1],
            ends: [then, first],
            moments,
        }
    }

    /// Does both beside a commit; what they answered, and whether it did.
    fn change(&self, names: &Arc<Names>) -> (Vec<Option<String>>, bool) {
        let threads = self.changes.map(|change| {
            let names = Arc::clone(names);
            shuttle::thread::spawn(move || try_it(&names, change))
        });
        let committing = Arc::clone(names);
        let committed = shuttle::thread::spawn(move || committing.fs.commit());
        let answers = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        (answers, committed.join().unwrap().is_ok())
    }

    fn run(&self) {
        let name = &self.name;
        let names = Arc::new(Names::open(&self.start));
        let (answers, is_committed) = self.change(&names);
        assert!(is_committed, "{name}");
        let found = (answers, tree_of(&names.fs));
        assert!(self.ends.contains(&found), "{name}: {found:#?}, not {:#?}", self.ends);

        let image = names.cut();
        check(&image, name);
        let cut = Opened::of_image(image, None);
        let left = tree_of(&cut.fs);
        assert!(self.moments.contains(&left), "{name}: behind a power cut {left:#?}");
        check(&cut.close(), name);

        names.fs.sync().unwrap();
        let image = names.cut_now();
        check(&image, name);
        let again = tree_of(&Opened::of_image(image, None).fs);
        assert_eq!(again, found.1, "{name}: opened again");
    }

    /// A write fails, or all do from one on: what was done then is lost in whole, and whoever wants it durable is told.
    fn run_failing(&self) {
        let name = &self.name;
        let names = Arc::new(Names::open(&self.start));
        names.plan_fault();
        let (answers, is_committed) = self.change(&names);
        let is_told = names.fs.sync().is_err() || !is_committed || answers.contains(&None);
        let image = names.image();
        check(&image, name);
        let again = Opened::of_image(image, None);
        let left = tree_of(&again.fs);
        if is_told {
            assert!(self.moments.contains(&left), "{name}: behind a failure {left:#?}");
        } else {
            let found = (answers, left);
            assert!(self.ends.contains(&found), "{name}: {found:#?}, though nobody was told");
        }
        check(&again.close(), name);
    }
}

/// One change, and all that is asked meanwhile.
struct Watched {
    start: Image,
    name: &'static str,
    change: Change,
    /// What each look may answer.
    answers: Vec<[String; 2]>,
    /// What each directory may have.
    listings: Vec<[Vec<(String, String)>; 2]>,
}

impl Watched {
    fn new(start: &Image, (name, change): Named) -> Self {
        let (before, after) = (Names::open(start), Names::open(start));
        done(&after, change);
        let answers = LOOKS.iter().map(|(_, look)| [look(&before), look(&after)]).collect();
        let listings = (0..dirs(&before).len())
            .map(|number| [&before, &after].map(|names| listed(names, dirs(names)[number])))
            .collect();
        Self { start: start.clone(), name, change, answers, listings }
    }

    fn run(&self) {
        let names = Arc::new(Names::open(&self.start));
        let changing = Arc::clone(&names);
        let change = self.change;
        let changed = shuttle::thread::spawn(move || done(&changing, change));
        // Each has its turn at each moment.
        let first = shuttle::rand::thread_rng().gen_range(0..LOOKS.len());
        let looks = LOOKS.iter().zip(&self.answers);
        for ((look_name, look), may_be) in looks.clone().skip(first).chain(looks.take(first)) {
            let found = look(&names);
            let name = self.name;
            assert!(may_be.contains(&found), "{name}: {look_name}: {found}, not {may_be:?}");
        }
        changed.join().unwrap();
    }

    /// Names that come or go meanwhile may be told or not, all others are, once, but for what leads elsewhere then; and what is told was so.
    fn run_listing(&self) {
        let names = Arc::new(Names::open(&self.start));
        let changing = Arc::clone(&names);
        let change = self.change;
        let changed = shuttle::thread::spawn(move || done(&changing, change));
        for (dir, may_be) in dirs(&names).into_iter().zip(&self.listings) {
            let name = format!("{}: names in {}", self.name, names.shown(dir));
            let found = listed(&names, dir);
            let [before, after] = may_be.each_ref().map(|all| all.iter().collect::<BTreeSet<_>>());
            let told: BTreeSet<_> = found.iter().collect();
            let all: BTreeSet<_> = before.union(&after).copied().collect();
            assert!(told.is_subset(&all), "{name}: {found:?}, not {may_be:?}");
            for stays in before.intersection(&after) {
                let count = found.iter().filter(|entry| entry == stays).count();
                assert_eq!(count, 1, "{name}: {stays:?} in {found:?}");
            }
            // What leads elsewhere then may be met twice.
            let is_told = |wanted: &str| found.iter().any(|(name, _)| name == wanted);
            let stays =
                before.iter().filter(|(name, _)| after.iter().any(|other| other.0 == *name));
            for (stays, _) in stays {
                assert!(is_told(stays), "{name}: {stays:?} in {found:?}, not {may_be:?}");
            }
        }
        changed.join().unwrap();
    }
}

fn dirs(names: &Names) -> [InodeId; 5] {
    [names.top, names.a, names.b, names.s, names.t]
}

#[test]
fn names_are_what_they_were_at_some_moment() {
    let start = world::start();
    each(CHANGES.to_vec(), |named| {
        let _told = ToldOfPanic(named.0.to_owned());
        let start = start.clone();
        let watched = Arc::new(crate::made(move || Watched::new(&start, named)));
        let same = Arc::clone(&watched);
        explore(20 * runs(), move || watched.run());
        explore(5 * runs(), move || same.run_listing());
    });
}

#[test]
fn any_two_changes_of_names_are_one_after_the_other() {
    let start = world::start();
    let with = |index: usize| CHANGES[index..].iter().map(move |other| [CHANGES[index], *other]);
    each((0..CHANGES.len()).flat_map(with).collect(), |pair| {
        let _told = ToldOfPanic(format!("{} beside {}", pair[0].0, pair[1].0));
        let start = start.clone();
        let case = Arc::new(crate::made(move || Case::new(&start, pair)));
        let same = Arc::clone(&case);
        explore(runs(), move || case.run());
        explore(runs(), move || same.run_failing());
    });
}
