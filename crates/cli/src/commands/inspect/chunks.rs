//! `ubtrfs inspect chunks`: where logical addresses lie on the devices.

use serde::Serialize;
use ubtrfs_ondisk::chunk::Chunk;

use crate::failure::{Exit, Result};
use crate::image::DeviceArgs;
use crate::output::Output;
use crate::output::json::Array;
use crate::output::table::{Align, Table};

/// List the chunks: ranges of logical addresses and where they lie on the devices
#[derive(clap::Args)]
#[command(after_help = "\
Example:
  ubtrfs inspect chunks disk.img")]
pub struct Args {
    #[command(flatten)]
    image: DeviceArgs,
    /// Print JSON: an array with one object a chunk
    #[arg(long)]
    json: bool,
}

/// Lists.
pub fn run(args: &Args, out: &mut Output) -> Result<Exit> {
    let image = args.image.read()?;
    let chunks = image.filesystem().volume().chunks();
    if args.json {
        let mut array = Array::begin(out)?;
        for chunk in &chunks {
            array.element(out, &JsonChunk::new(chunk))?;
        }
        array.end(out)?;
        return Ok(Exit::Done);
    }
    let columns = [Align::Right, Align::Right, Align::Left, Align::Left, Align::Left];
    let mut table = Table::new(&columns, "  ");
    table.row(["Logical", "Length", "Type", "Profile", "Stripes (device:offset)"]);
    for chunk in &chunks {
        let stripes = chunk.stripes.iter();
        let stripes: Vec<String> =
            stripes.map(|stripe| format!("{}:{}", stripe.device, stripe.offset)).collect();
        table.row([
            chunk.start.to_string(),
            chunk.len_bytes.to_string(),
            chunk.flags.type_name().to_owned(),
            chunk.flags.profile_name().unwrap_or("unknown").to_owned(),
            stripes.join(" "),
        ]);
    }
    table.lines().try_for_each(|line| out.line(&line))?;
    Ok(Exit::Done)
}

#[derive(Serialize)]
struct JsonChunk {
    start: u64,
    length: u64,
    #[serde(rename = "type")]
    ty: &'static str,
    profile: &'static str,
    stripe_length: u64,
    stripes: Vec<JsonStripe>,
}

#[derive(Serialize)]
struct JsonStripe {
    devid: u64,
    offset: u64,
    device_uuid: String,
}

impl JsonChunk {
    fn new(chunk: &Chunk) -> Self {
        Self {
            start: chunk.start.0,
            length: chunk.len_bytes,
            ty: chunk.flags.type_name(),
            profile: chunk.flags.profile_name().unwrap_or("unknown"),
            stripe_length: chunk.stripe_len_bytes,
            stripes: chunk
                .stripes
                .iter()
                .map(|stripe| JsonStripe {
                    devid: stripe.device.0,
                    offset: stripe.offset.0,
                    device_uuid: stripe.device_uuid.to_string(),
                })
                .collect(),
        }
    }
}
