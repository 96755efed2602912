//! Text in HTML and SVG. Names of files, pools and tags are untrusted.

/// `text` as the content of an element or of a quoted attribute. Control characters, which neither may have, are replaced.
pub(super) fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '&' => safe.push_str("&amp;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            '\n' => safe.push(c),
            // Also those that change the direction of the text behind them.
            c if c.is_control() || is_bidirectional(c) => safe.push(char::REPLACEMENT_CHARACTER),
            c => safe.push(c),
        }
    }
    safe
}

/// JSON as the content of a `script` element: in plain letters, of which none can end it.
pub(super) fn embedded(json: &str) -> String {
    let mut safe = String::with_capacity(json.len());
    for c in json.chars() {
        match c {
            '<' | '\u{7f}'.. => {
                c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| safe += &format!("\\u{unit:04x}"));
            }
            c => safe.push(c),
        }
    }
    safe
}

fn is_bidirectional(c: char) -> bool {
    matches!(c, '\u{200E}' | '\u{200F}' | '\u{202A}'..='\u{202E}' | '\u{2066}'..='\u{2069}' | '\u{FFFE}' | '\u{FFFF}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_open_an_element_or_leave_an_attribute() {
        let hostile = "</title><script>alert('x')</script>\" onload=\"x & \u{1b}[31m\u{202E}";
        let safe = escaped(hostile);
        assert_eq!(
            safe,
            "&lt;/title&gt;&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;&quot; onload=&quot;x &amp; \u{FFFD}[31m\u{FFFD}"
        );
    }

    #[test]
    fn json_cannot_end_its_element_and_stays_the_same() {
        let text = "</script><!-- \u{202E} \u{1F600} \"\\ ü";
        let json = serde_json::to_string(text).unwrap();
        let safe = embedded(&json);
        assert!(safe.is_ascii() && !safe.contains('<'), "{safe}");
        assert_eq!(serde_json::from_str::<String>(&safe).unwrap(), text);
    }
}
