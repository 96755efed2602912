//! The tags and call stacks of a file, to which its records refer by number.

use std::collections::HashMap;

use super::format::Item;
use crate::record::Name;

/// Maximum number of tags in a file, and of call stacks. A reader accepts 65,536 tags, call stacks and pools together.
const NAMES_MAX: usize = 24_576;

/// The names in a file and their numbers, which stay valid while the process continues the file.
#[derive(Debug, Default)]
pub(super) struct Names {
    /// Numbers of the tags, and numbers of the call stacks. The maps are separate, so that neither kind uses up the numbers of
    /// the other.
    numbers: [HashMap<Name, u32>; 2],
    /// Names that are not yet in the file.
    pub(super) unwritten: Vec<(Name, u32)>,
}

impl Names {
    /// Returns the number of a name, from 1. Returns 0, which is not a name, for further names beyond [`NAMES_MAX`].
    pub(super) fn number(&mut self, name: Name) -> u32 {
        let numbers = &mut self.numbers[usize::from(matches!(name, Name::Stack(_)))];
        match numbers.get(&name) {
            Some(&number) => number,
            None if numbers.len() >= NAMES_MAX => 0,
            None => {
                let number = u32::try_from(numbers.len() + 1).unwrap_or(0);
                numbers.insert(name.clone(), number);
                self.unwritten.push((name, number));
                number
            }
        }
    }

    /// Marks all names as unwritten, since a failed write may have lost some.
    pub(super) fn forget_written(&mut self) {
        self.unwritten = self.numbers.iter().flatten().map(|(name, &number)| (name.clone(), number)).collect();
    }
}

/// Converts a name to an item. Reads files to resolve the frames of a call stack.
pub(super) fn item((name, number): (Name, u32)) -> Item {
    match name {
        Name::Tag(name) => Item::Tag(number, name.into()),
        Name::Stack(stack) => Item::Stack(number, stack.frames()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn excess_tags_have_no_number_and_leave_room_for_stacks() {
        let mut names = Names::default();
        let mut tag = |n: usize| names.number(Name::Tag(format!("tag {n}").into()));
        let numbers: Vec<_> = (0..NAMES_MAX + 1000).map(&mut tag).collect();
        assert_eq!((tag(7), numbers[7]), (8, 8));
        assert!(numbers[NAMES_MAX..].iter().all(|&number| number == 0));
        assert_eq!((names.numbers[0].len(), names.unwritten.len()), (NAMES_MAX, NAMES_MAX));
        names.unwritten.clear();
        names.forget_written();
        assert_eq!(names.unwritten.len(), NAMES_MAX);
        let stack = pinpool_os::call_stack::CallStack::here();
        assert_eq!(names.number(Name::Stack(stack.into())), 1);
    }
}
