//! The tags and call stacks of a file, to which its records refer by number.

use std::collections::HashMap;
use std::sync::Arc;

use super::format::Item;
use pinpool_os::call_stack::CallStack;

/// Most tags of a file: half of what a reader accepts.
const TAGS_MAX: u32 = 32_768;
/// Most call stacks of a file: a quarter of that.
const STACKS_MAX: u32 = 16_384;
/// The tag of requests beyond [`TAGS_MAX`].
const OTHER_TAGS: &str = "(other tags)";

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Name {
    Tag(Box<str>),
    Stack(Arc<CallStack>),
}

impl Name {
    /// Reads files to resolve the frames of a call stack.
    pub(super) fn item(self, number: u32) -> Item {
        match self {
            Self::Tag(name) => Item::Tag(number, name.into()),
            Self::Stack(stack) => Item::Stack(number, stack.frames()),
        }
    }
}

/// Tags and call stacks are each numbered from 1. Numbers stay valid while the process continues the file.
#[derive(Debug, Default)]
pub(super) struct Names {
    numbers: HashMap<Name, u32>,
    tags: u32,
    stacks: u32,
    /// Not yet in the file.
    pub(super) unwritten: Vec<(Name, u32)>,
}

impl Names {
    /// The number of a tag; tags beyond [`TAGS_MAX`] share one.
    pub(super) fn tag(&mut self, name: &str) -> u32 {
        let number = self.number(Name::Tag(name.into()), TAGS_MAX - 1);
        number.or_else(|| self.number(Name::Tag(OTHER_TAGS.into()), TAGS_MAX)).unwrap_or(0)
    }

    /// The number of a call stack; `None` beyond [`STACKS_MAX`].
    pub(super) fn stack(&mut self, stack: &Arc<CallStack>) -> Option<u32> {
        self.number(Name::Stack(stack.clone()), STACKS_MAX)
    }

    /// `None` for a new name if there are already `most` of its kind.
    fn number(&mut self, name: Name, most: u32) -> Option<u32> {
        if let Some(&number) = self.numbers.get(&name) {
            return Some(number);
        }
        let count = match name {
            Name::Tag(_) => &mut self.tags,
            Name::Stack(_) => &mut self.stacks,
        };
        let number = Some(*count + 1).filter(|&number| number <= most)?;
        *count = number;
        self.numbers.insert(name.clone(), number);
        self.unwritten.push((name, number));
        Some(number)
    }

    /// Writes all names again, since a failed write may have lost some.
    pub(super) fn forget_written(&mut self) {
        self.unwritten = self.numbers.iter().map(|(name, &number)| (name.clone(), number)).collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_keeps_its_number_and_excess_tags_share_one() {
        let mut names = Names::default();
        let numbers: Vec<_> = (0..TAGS_MAX + 1000).map(|n| names.tag(&format!("tag {n}"))).collect();
        assert_eq!((names.numbers.len(), names.unwritten.len()), (TAGS_MAX as usize, TAGS_MAX as usize));
        assert_eq!((names.tag("tag 7"), numbers[7]), (8, 8));
        let other = names.tag(OTHER_TAGS);
        assert!(numbers[TAGS_MAX as usize - 1..].iter().all(|&number| number == other));
        names.unwritten.clear();
        names.forget_written();
        assert_eq!(names.unwritten.len(), TAGS_MAX as usize);
    }
}
