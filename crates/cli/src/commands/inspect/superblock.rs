//! `ubtrfs inspect super`: the superblock's fields, of any copy, sound or not.

use std::path::PathBuf;

use serde_json::{Map, Value, json};
use ubtrfs_ondisk::misc::OnDisk;
use ubtrfs_ondisk::print::{self, Record};
use ubtrfs_ondisk::superblock::{MAGIC, SUPERBLOCK_BYTES, SUPERBLOCK_OFFSETS, Superblock};
use ubtrfs_ondisk::{PhysicalAddr, verify};

use crate::failure::{Exit, Failure, Result};
use crate::image::{Raw, WindowArgs};
use crate::output::{Output, json};

/// Fields that are shown only on request.
const FULL_ONLY: [&str; 2] = ["sys_chunk", "backup_root"];
/// Fields that stay text in JSON, even where they consist of digits.
const TEXT: [&str; 3] = ["label", "csum", "magic"];

/// Print the superblock
///
/// Reads the bytes as they lie there, without opening the filesystem: a superblock that is damaged is
/// printed, too, and what is wrong with it. The exit code is then 1.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  ubtrfs inspect super disk.img
  ubtrfs inspect super --all disk.img          every copy
  ubtrfs inspect super --json disk.img | jq .[0].uuid"
)]
pub struct Args {
    /// The image or device
    #[arg(value_name = "IMAGE")]
    image: PathBuf,
    /// Print every copy that fits on the device
    #[arg(short, long, conflicts_with = "super_copy")]
    all: bool,
    /// Print copy N: 0 the main one at 64K, 1 at 64M, 2 at 256G
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=2))]
    super_copy: u8,
    /// Print the system chunks and the backup roots as well
    #[arg(short, long)]
    full: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    window: WindowArgs,
}

/// Prints it; the answer is no where a copy is damaged.
pub fn run(args: &Args, out: &mut Output) -> Result<Exit> {
    let raw = Raw::open(&args.image, &args.window)?;
    let wanted = if args.all { 0..SUPERBLOCK_OFFSETS.len() } else { one(args.super_copy) };
    let mut found = Vec::new();
    for number in wanted {
        let at = SUPERBLOCK_OFFSETS[number];
        if at.0 + SUPERBLOCK_BYTES as u64 <= raw.len_bytes() {
            let mut bytes = vec![0; SUPERBLOCK_BYTES];
            raw.read_at(at, &mut bytes)?;
            found.push(Copy::new(number, at, &bytes));
        } else if !args.all {
            let len_bytes = raw.len_bytes();
            let why = format!("copy {number} would lie at byte {at}, there are {len_bytes}");
            return Err(Failure::new(Exit::Io, "reading the superblock", why).at_path(&args.image));
        }
    }
    if args.json {
        let values: Vec<Value> = found.iter().map(|copy| copy.to_json(args.full)).collect();
        json::document(out, &values)?;
    } else {
        found.iter().try_for_each(|copy| copy.print(args.full, out))?;
    }
    let sound = !found.is_empty() && found.iter().all(|copy| copy.problem.is_none());
    Ok(if sound { Exit::Done } else { Exit::No })
}

fn one(number: u8) -> std::ops::Range<usize> {
    let number = usize::from(number);
    number..number + 1
}

/// One copy as it lies there.
struct Copy {
    number: usize,
    at: PhysicalAddr,
    problem: Option<String>,
    /// Nothing where there is no superblock at all.
    fields: Record,
}

impl Copy {
    fn new(number: usize, at: PhysicalAddr, bytes: &[u8]) -> Self {
        let problem = Superblock::parse(bytes, at)
            .and_then(|superblock| verify::superblock(&superblock))
            .err()
            .map(|corruption| corruption.to_string());
        let fields = match Superblock::peek(bytes) {
            Ok(superblock) if superblock.magic.get() == MAGIC => print::superblock(superblock),
            _ => Record::new(),
        };
        Self { number, at, problem, fields }
    }

    fn fields(&self, full: bool) -> impl Iterator<Item = &(&'static str, String)> {
        self.fields.iter().filter(move |(name, _)| full || !FULL_ONLY.contains(name))
    }

    fn print(&self, full: bool, out: &mut Output) -> Result<()> {
        out.line(&format!("superblock copy {} at byte {}", self.number, self.at))?;
        if let Some(problem) = &self.problem {
            out.line(&format!("  damaged: {problem}"))?;
        }
        let width = self.fields(full).map(|(name, _)| name.len()).max().unwrap_or(0);
        for (name, value) in self.fields(full) {
            out.line(&format!("  {name:<width$}  {value}"))?;
        }
        Ok(())
    }

    /// Fields that occur several times become arrays.
    fn to_json(&self, full: bool) -> Value {
        let mut object = Map::new();
        object.insert("copy".into(), json!(self.number));
        object.insert("at".into(), json!(self.at.0));
        object.insert("sound".into(), json!(self.problem.is_none()));
        object.insert("problem".into(), json!(self.problem));
        for (name, value) in self.fields(full) {
            let value = match value.parse::<u64>() {
                Ok(number) if !TEXT.contains(name) => json!(number),
                _ => json!(value),
            };
            if !FULL_ONLY.contains(name) {
                object.insert((*name).into(), value);
            } else if let Value::Array(values) =
                object.entry(*name).or_insert_with(|| Value::Array(Vec::new()))
            {
                values.push(value);
            }
        }
        Value::Object(object)
    }
}
