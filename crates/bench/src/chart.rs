//! Charts as SVG, drawn from a table's figures.

use std::fmt::Write as _;

/// A bar.
#[derive(Clone, PartialEq, Debug)]
pub struct Bar {
    /// What it stands for.
    pub label: String,
    /// How long it is.
    pub value: f64,
}

/// What a chart shows.
#[derive(Clone, PartialEq, Debug)]
pub enum Shape {
    /// A bar a row, in groups with a heading each.
    Bars(Vec<(String, Vec<Bar>)>),
    /// A line a contestant over sizes.
    Lines {
        /// What the sizes are.
        x_label: String,
        /// Names, and points in ascending order of the size.
        lines: Vec<(String, Vec<(f64, f64)>)>,
    },
}

/// A picture of figures.
#[derive(Clone, PartialEq, Debug)]
pub struct Chart {
    /// What it shows.
    pub title: String,
    /// Of the values.
    pub unit: String,
    /// The values.
    pub shape: Shape,
    /// The value to reach, drawn as a line.
    pub goal: Option<f64>,
}

const WIDTH: f64 = 860.0;
const LABEL_WIDTH: f64 = 250.0;
const VALUE_WIDTH: f64 = 110.0;
const BAR_HEIGHT: f64 = 20.0;
const BAR_STEP: f64 = 27.0;
const HEADING_HEIGHT: f64 = 30.0;
/// Values that lie further apart than this are shown on a logarithmic scale.
const LOG_FROM: f64 = 40.0;
const COLOURS: [&str; 7] =
    ["#2563a8", "#c2571a", "#3c8031", "#8a4a9e", "#6b6b6b", "#a83232", "#1f8a8a"];

/// Characters that mean something in HTML, so that they do not.
pub(crate) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            c => escaped.push(c),
        }
    }
    escaped
}

/// Three figures that matter.
fn short(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        v if v >= 10_000.0 => {
            let digits = format!("{value:.0}");
            let mut text = String::new();
            for (at, digit) in digits.chars().enumerate() {
                if at > 0 && (digits.len() - at).is_multiple_of(3) {
                    text.push(' ');
                }
                text.push(digit);
            }
            text
        }
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        v if v >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// From values to 0 to 1.
struct Scale {
    min: f64,
    max: f64,
    is_log: bool,
}

impl Scale {
    fn of(values: &[f64]) -> Self {
        let positive = || values.iter().copied().filter(|value| *value > 0.0);
        let max = positive().fold(0.0, f64::max);
        let min = positive().fold(f64::INFINITY, f64::min);
        let is_log = max > min * LOG_FROM;
        // Whole decades, so that the shortest bar is still one.
        let min = if is_log { 10_f64.powf((min.log10() - 0.2).floor()) } else { 0.0 };
        Self { min, max: if max > 0.0 { max } else { 1.0 }, is_log }
    }

    fn place(&self, value: f64) -> f64 {
        let place = if self.is_log {
            (value.max(self.min) / self.min).log10() / (self.max / self.min).log10()
        } else {
            value / self.max
        };
        place.clamp(0.0, 1.0)
    }

    /// Values at which a line is drawn.
    fn ticks(&self) -> Vec<f64> {
        if self.is_log {
            let first = self.min.log10().round() as i32;
            let last = self.max.log10().floor() as i32;
            return (first..=last).map(|power| 10_f64.powi(power)).collect();
        }
        let rough = self.max / 4.0;
        let power = 10_f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|n| n * power).into_iter().find(|s| *s >= rough);
        let step = step.unwrap_or(rough);
        (0..=8).map(|n| f64::from(n) * step).take_while(|tick| *tick <= self.max).collect()
    }

    fn note(&self) -> &'static str {
        if self.is_log { ", logarithmic" } else { "" }
    }
}

impl Chart {
    /// As an SVG element; empty where there is nothing to draw.
    pub(crate) fn to_svg(&self) -> String {
        match &self.shape {
            Shape::Bars(groups) => self.bars(groups),
            Shape::Lines { x_label, lines } => self.lines(x_label, lines),
        }
    }

    fn begin(&self, height: f64, scale: &Scale) -> String {
        let title = escape(&self.title);
        let mut svg = format!(
            "<svg viewBox=\"0 0 {WIDTH:.0} {height:.0}\" role=\"img\" aria-label=\"{title}\">\n"
        );
        let unit = escape(&self.unit);
        let note = scale.note();
        let _ = writeln!(svg, "<text class=\"title\" x=\"0\" y=\"18\">{title}</text>");
        let _ = writeln!(
            svg,
            "<text class=\"unit\" x=\"{WIDTH}\" y=\"18\" text-anchor=\"end\">{unit}{note}</text>"
        );
        svg
    }

    fn bars(&self, groups: &[(String, Vec<Bar>)]) -> String {
        let all: Vec<f64> =
            groups.iter().flat_map(|(_, bars)| bars.iter().map(|b| b.value)).collect();
        if all.is_empty() {
            return String::new();
        }
        let scale = Scale::of(&all);
        let headed = groups.iter().filter(|(heading, _)| !heading.is_empty()).count();
        let top = 34.0;
        let body = all.len() as f64 * BAR_STEP + headed as f64 * HEADING_HEIGHT;
        let height = top + body + 26.0;
        let mut svg = self.begin(height, &scale);
        let (left, right) = (LABEL_WIDTH, WIDTH - VALUE_WIDTH);
        let x = |value: f64| left + scale.place(value) * (right - left);
        for tick in scale.ticks() {
            let (at, bottom, text) = (x(tick), top + body, short(tick));
            let _ = writeln!(
                svg,
                "<line class=\"grid\" x1=\"{at:.1}\" y1=\"{top}\" x2=\"{at:.1}\" y2=\"{bottom:.1}\"/>\
                 <text class=\"tick\" x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{text}</text>",
                bottom + 18.0
            );
        }
        let names = names(groups.iter().flat_map(|(_, bars)| bars.iter().map(|bar| &bar.label)));
        let mut y = top;
        for (heading, bars) in groups {
            if !heading.is_empty() {
                let _ = writeln!(
                    svg,
                    "<text class=\"heading\" x=\"0\" y=\"{:.1}\">{}</text>",
                    y + 21.0,
                    escape(heading)
                );
                y += HEADING_HEIGHT;
            }
            for bar in bars {
                let colour = colour(&names, &bar.label);
                let width = (x(bar.value) - left).max(1.0);
                let middle = y + BAR_HEIGHT / 2.0 + 5.0;
                let _ = writeln!(
                    svg,
                    "<text class=\"label\" x=\"{:.1}\" y=\"{middle:.1}\" text-anchor=\"end\">{}</text>\
                     <rect x=\"{left:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{BAR_HEIGHT}\" \
                     fill=\"{colour}\"/>\
                     <text class=\"value\" x=\"{:.1}\" y=\"{middle:.1}\">{}</text>",
                    left - 8.0,
                    escape(&bar.label),
                    left + width + 6.0,
                    short(bar.value)
                );
                y += BAR_STEP;
            }
        }
        if let Some(goal) = self.goal.filter(|goal| *goal <= scale.max && *goal >= scale.min) {
            let at = x(goal);
            let _ = writeln!(
                svg,
                "<line class=\"goal\" x1=\"{at:.1}\" y1=\"{top}\" x2=\"{at:.1}\" y2=\"{:.1}\"/>\
                 <text class=\"goal\" x=\"{:.1}\" y=\"{:.1}\">goal {}</text>",
                top + body,
                at + 4.0,
                top + 9.0,
                short(goal)
            );
        }
        svg.push_str("</svg>\n");
        svg
    }

    fn lines(&self, x_label: &str, lines: &[(String, Vec<(f64, f64)>)]) -> String {
        let points = || lines.iter().flat_map(|(_, points)| points);
        let values: Vec<f64> = points().map(|(_, y)| *y).collect();
        if values.is_empty() {
            return String::new();
        }
        let scale = Scale::of(&values);
        let x_max = points().map(|(x, _)| *x).fold(0.0, f64::max).max(f64::MIN_POSITIVE);
        let (left, right, top, bottom) = (70.0, 610.0, 40.0, 320.0);
        let mut svg = self.begin(bottom + 50.0, &scale);
        let (px, py) = (
            |x: f64| left + x / x_max * (right - left),
            |y: f64| bottom - scale.place(y) * (bottom - top),
        );
        for tick in scale.ticks() {
            let _ = writeln!(
                svg,
                "<line class=\"grid\" x1=\"{left}\" y1=\"{0:.1}\" x2=\"{right}\" y2=\"{0:.1}\"/>\
                 <text class=\"tick\" x=\"{1}\" y=\"{2:.1}\" text-anchor=\"end\">{3}</text>",
                py(tick),
                left - 8.0,
                py(tick) + 4.0,
                short(tick)
            );
        }
        let mut sizes: Vec<f64> = points().map(|(x, _)| *x).collect();
        sizes.sort_by(f64::total_cmp);
        sizes.dedup();
        for size in sizes {
            let _ = writeln!(
                svg,
                "<text class=\"tick\" x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
                px(size),
                bottom + 18.0,
                short(size)
            );
        }
        let _ = writeln!(
            svg,
            "<text class=\"unit\" x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            (left + right) / 2.0,
            bottom + 40.0,
            escape(x_label)
        );
        let names = names(lines.iter().map(|(name, _)| name));
        for (at, (name, points)) in lines.iter().enumerate() {
            let colour = colour(&names, name);
            let path: Vec<String> =
                points.iter().map(|(x, y)| format!("{:.1},{:.1}", px(*x), py(*y))).collect();
            let _ = writeln!(
                svg,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2.5\"/>",
                path.join(" ")
            );
            for (x, y) in points {
                let _ = writeln!(
                    svg,
                    "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"4\" fill=\"{colour}\"/>",
                    px(*x),
                    py(*y)
                );
            }
            let y = top + 12.0 + at as f64 * 22.0;
            let last = points.last().map_or(0.0, |(_, y)| *y);
            let _ = writeln!(
                svg,
                "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"12\" height=\"12\" fill=\"{colour}\"/>\
                 <text class=\"value\" x=\"{:.1}\" y=\"{y:.1}\">{} ({})</text>",
                right + 24.0,
                y - 11.0,
                right + 42.0,
                escape(name),
                short(last)
            );
        }
        svg.push_str("</svg>\n");
        svg
    }
}

fn names<'a>(labels: impl Iterator<Item = &'a String>) -> Vec<&'a str> {
    let mut names: Vec<&str> = Vec::new();
    for label in labels {
        if !names.contains(&label.as_str()) {
            names.push(label);
        }
    }
    names
}

/// One colour for one contestant in all charts; for others by their place.
fn colour(names: &[&str], label: &str) -> &'static str {
    let known = ["ubtrfs", "kernel btrfs", "kernel xfs", "plain file"];
    if let Some(at) = known.iter().position(|name| *name == label) {
        return COLOURS[at];
    }
    let others = names.iter().filter(|name| !known.contains(name));
    let at = others.take_while(|name| **name != label).count();
    COLOURS[known.len() + at % (COLOURS.len() - known.len())]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(shape: Shape) -> Chart {
        Chart { title: "a < b".to_owned(), unit: "ns".to_owned(), shape, goal: Some(60.0) }
    }

    #[test]
    fn bars_are_as_long_as_their_values() {
        let bar = |label: &str, value| Bar { label: label.to_owned(), value };
        let bars = vec![bar("ours", 50.0), bar("kernel", 100.0)];
        let svg = chart(Shape::Bars(vec![("warm".to_owned(), bars)])).to_svg();
        assert!(svg.contains("a &lt; b") && svg.contains("goal 60.0") && svg.contains("warm"));
        assert!(svg.contains("width=\"250.0\"") && svg.contains("width=\"500.0\""), "{svg}");
    }

    #[test]
    fn values_far_apart_are_on_a_logarithmic_scale() {
        let scale = Scale::of(&[2.0, 200_000.0]);
        assert!(scale.is_log);
        assert!(scale.place(2.0) > 0.0 && scale.place(200_000.0) == 1.0);
        assert_eq!(scale.ticks().len(), 6);
        assert!(!Scale::of(&[5.0, 0.0, 100.0]).is_log);
    }

    #[test]
    fn charts_without_values_are_nothing() {
        assert_eq!(chart(Shape::Bars(Vec::new())).to_svg(), "");
        let lines = Shape::Lines { x_label: "files".to_owned(), lines: Vec::new() };
        assert_eq!(chart(lines).to_svg(), "");
    }

    #[test]
    fn large_numbers_are_grouped() {
        assert_eq!(short(1_234_567.0), "1 234 567");
        assert_eq!(short(12.34), "12.3");
        assert_eq!(short(0.0), "0");
    }
}
