# error: no fusion is being built
# at: 5:5
import hostir as hi

a = hi.tensor("a", [4])
