//! Sizes as btrfs-progs reads and prints them: powers of 1024.

/// Reads `16k`, `1.5G`-less sizes: digits and at most one suffix of `K M G T P E`, with or without
/// `B` or `iB` behind it, in either case. Without a suffix: bytes.
///
/// # Errors
/// What is wrong with the text, for a message.
pub fn parse(text: &str) -> Result<u64, String> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, suffix) = text.split_at(digits);
    if number.is_empty() {
        return Err("expected a number of bytes such as 4096, 16K, 512M or 2G".into());
    }
    let shift = match suffix.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        "p" | "pb" | "pib" => 50,
        "e" | "eb" | "eib" => 60,
        _ => {
            return Err(format!(
                "unknown suffix '{suffix}'; K, M, G, T, P and E are known, powers of 1024"
            ));
        }
    };
    let number: u64 = number.parse().map_err(|_| too_large())?;
    number.checked_mul(1 << shift).ok_or_else(too_large)
}

fn too_large() -> String {
    "too large; the limit is just under 16E".into()
}

/// A size with two decimals, as `btrfs filesystem df` prints it.
pub fn binary(bytes: u64) -> String {
    let (divisor, unit) = unit_of(bytes);
    if divisor == 1 {
        return format!("{bytes}.00B");
    }
    let hundredths = (u128::from(bytes) * 100 + u128::from(divisor) / 2) / u128::from(divisor);
    format!("{}.{:02}{unit}iB", hundredths / 100, hundredths % 100)
}

/// A size in at most four columns, as `ls -h` and `du -h` print it: rounded up.
pub fn human(bytes: u64) -> String {
    let (mut divisor, mut unit) = unit_of(bytes);
    if divisor == 1 {
        return bytes.to_string();
    }
    let wide = u128::from(bytes);
    let tenths = (wide * 10).div_ceil(u128::from(divisor));
    if tenths < 100 {
        return format!("{}.{}{unit}", tenths / 10, tenths % 10);
    }
    let mut whole = wide.div_ceil(u128::from(divisor));
    if whole == 1024 && unit != 'E' {
        (divisor, unit) = next_unit(divisor);
        whole = wide.div_ceil(u128::from(divisor));
        return format!("{whole}.0{unit}");
    }
    format!("{whole}{unit}")
}

const UNITS: [char; 7] = ['B', 'K', 'M', 'G', 'T', 'P', 'E'];

fn unit_of(bytes: u64) -> (u64, char) {
    let power = if bytes == 0 { 0 } else { bytes.ilog2() / 10 };
    unit_at(power)
}

fn next_unit(divisor: u64) -> (u64, char) {
    unit_at(divisor.ilog2() / 10 + 1)
}

fn unit_at(power: u32) -> (u64, char) {
    let unit = UNITS.get(power as usize).copied().unwrap_or('E');
    (1 << (10 * power), unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_suffixes_are_powers_of_1024() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("16k", 16 << 10),
            ("16K", 16 << 10),
            ("2M", 2 << 20),
            ("3GiB", 3 << 30),
            ("1tb", 1 << 40),
            ("1P", 1 << 50),
            ("15E", 15 << 60),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn parse_nonsense_is_refused() {
        for text in ["", "K", "-1", "1.5G", "1X", "16E", "99999999999999999999", "1 G"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn binary_two_decimals() {
        assert_eq!(binary(0), "0.00B");
        assert_eq!(binary(1023), "1023.00B");
        assert_eq!(binary(16 << 10), "16.00KiB");
        assert_eq!(binary(1536 << 20), "1.50GiB");
        assert_eq!(binary(u64::MAX), "16.00EiB");
    }

    #[test]
    fn human_rounds_up_as_coreutils() {
        for (bytes, text) in [
            (0, "0"),
            (1023, "1023"),
            (1024, "1.0K"),
            (1025, "1.1K"),
            (10 << 10, "10K"),
            (10_241, "11K"),
            ((1 << 20) - 1, "1.0M"),
            (1 << 20, "1.0M"),
            (235 << 20, "235M"),
            (u64::MAX, "16E"),
        ] {
            assert_eq!(human(bytes), text, "{bytes}");
        }
    }
}
