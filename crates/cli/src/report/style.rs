//! Colours, for light and dark, and the dashes that tell lines apart without them.
//!
//! plotters writes colours into each element. It draws with colours that stand for roles, and [`restyle`] makes classes of
//! them, so that one style sheet serves both colour schemes.

use plotters::style::RGBColor;

/// What an element is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Paper,
    Ink,
    Grid,
    /// One of several lines.
    Series(u8),
    Mark,
    /// One of the states of memory.
    State(u8),
}

/// Lines that look different.
pub(super) const SERIES: u8 = 6;
/// The first two bytes of the colours that stand for roles.
const STANDS_FOR_A_ROLE: (u8, u8) = (0xC1, 0xA5);

/// Class, light colour, dark colour, dashes.
const LOOKS: [(Role, &str, &str, &str, &str); 14] = [
    (Role::Paper, "paper", "#ffffff", "#16181c", ""),
    (Role::Ink, "ink", "#1f2328", "#e6e8eb", ""),
    (Role::Grid, "grid", "#d8dce1", "#3a3f47", ""),
    (Role::Series(0), "s0", "#0b5cad", "#6db3ff", ""),
    (Role::Series(1), "s1", "#a8480a", "#ff9f5a", "9 4"),
    (Role::Series(2), "s2", "#0b6b47", "#4fd6a0", "2 3"),
    (Role::Series(3), "s3", "#7b3aa0", "#cf9af0", "10 3 2 3"),
    (Role::Series(4), "s4", "#555b63", "#aab2bd", "16 5"),
    (Role::Series(5), "s5", "#8a1c4a", "#ff8fb8", "5 2 1 2 1 2"),
    (Role::Mark, "mark", "#b3001b", "#ff7b7b", ""),
    (Role::State(0), "m0", "#dfe6ee", "#2b323b", ""),
    (Role::State(1), "m1", "#9cc3e8", "#39618a", ""),
    (Role::State(2), "m2", "#0b5cad", "#6db3ff", ""),
    (Role::State(3), "m3", "#a8480a", "#ff9f5a", ""),
];

impl Role {
    pub(super) fn color(self) -> RGBColor {
        let number = match self {
            Self::Paper => 0,
            Self::Ink => 1,
            Self::Grid => 2,
            Self::Series(number) => 16 + number % SERIES,
            Self::Mark => 3,
            Self::State(number) => 32 + number,
        };
        RGBColor(STANDS_FOR_A_ROLE.0, STANDS_FOR_A_ROLE.1, number)
    }
}

/// Classes in place of the colours, and no attribute that says what is the case without it.
pub(super) fn restyle(svg: &str) -> String {
    let mut styled =
        svg.replace(" stroke=\"none\"", "").replace(" opacity=\"1\"", "").replace(" stroke-width=\"1\"", "");
    for (role, class, ..) in LOOKS {
        let RGBColor(red, green, blue) = role.color();
        let color = format!("#{red:02X}{green:02X}{blue:02X}");
        styled = styled
            .replace(&format!("fill=\"{color}\""), &format!("class=\"f-{class}\""))
            .replace(&format!("stroke=\"{color}\""), &format!("class=\"l-{class}\""));
    }
    styled
}

/// The style sheet of the figures.
pub(super) fn css() -> String {
    let mut css = ".plot{max-width:100%;height:auto}.plot text{font-family:system-ui,sans-serif}\n".to_owned();
    let rules = |css: &mut String, is_dark: bool| {
        for (_, class, light, dark, dashes) in LOOKS {
            let color = if is_dark { dark } else { light };
            css.push_str(&format!(".plot .f-{class}{{fill:{color}}}.plot .l-{class}{{stroke:{color}"));
            if !dashes.is_empty() && !is_dark {
                css.push_str(&format!(";stroke-dasharray:{dashes}"));
            }
            css.push_str("}\n");
        }
    };
    rules(&mut css, false);
    // Paper is white whatever the screen is.
    css.push_str("@media screen and (prefers-color-scheme:dark){\n");
    rules(&mut css, true);
    css.push_str("}\n");
    css
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_role_has_a_colour_of_its_own() {
        let colors: std::collections::HashSet<_> = LOOKS.iter().map(|(role, ..)| role.color()).collect();
        assert_eq!(colors.len(), LOOKS.len());
        for (role, class, ..) in LOOKS {
            let RGBColor(red, green, blue) = role.color();
            let drawn = format!("<line opacity=\"1\" stroke=\"#{red:02X}{green:02X}{blue:02X}\" x1=\"0\"/>");
            assert_eq!(restyle(&drawn), format!("<line class=\"l-{class}\" x1=\"0\"/>"));
        }
    }
}
