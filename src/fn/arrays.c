/*
 * arrays.c
 *		Array arguments of the functions that process many elements.
 */
#include "postgres.h"

#include "utils/array.h"
#include "utils/lsyscache.h"

#include "fn/fn.h"

/* Read the elements of an array; false if the argument is null */
bool
idem_arrays_get(FunctionCallInfo fcinfo, int arg, const char *name, Datum **elems, bool **nulls,
				int *n)
{
	ArrayType *array;
	int16 typlen;
	bool typbyval;
	char typalign;

	*n = 0;
	if (PG_ARGISNULL(arg))
		return false;
	array = PG_GETARG_ARRAYTYPE_P(arg);
	if (ARR_NDIM(array) > 1)
		ereport(ERROR,
				errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("array \"%s\" must have one dimension", name),
				errdetail("It has %d dimensions.", ARR_NDIM(array)),
				errhint("Flatten the array."));
	get_typlenbyvalalign(ARR_ELEMTYPE(array), &typlen, &typbyval, &typalign);
	deconstruct_array(array, ARR_ELEMTYPE(array), typlen, typbyval, typalign, elems, nulls, n);
	return true;
}

/*
 * Read the elements of an array, or raise an error if it is null.  If the caller passes
 * no place for nulls, an element that is null is an error, too.
 */
void
idem_arrays_require(FunctionCallInfo fcinfo, int arg, const char *name, Datum **elems, bool **nulls,
					int *n)
{
	bool *isnull;

	if (!idem_arrays_get(fcinfo, arg, name, elems, nulls ? nulls : &isnull, n))
		ereport(ERROR,
				errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				errmsg("array \"%s\" must not be null", name),
				errdetail("Without it there is nothing to do."),
				errhint("Pass an empty array if there is nothing to do."));
	for (int i = 0; i < *n && nulls == NULL; i++)
	{
		if (isnull[i])
			ereport(ERROR,
					errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					errmsg("array \"%s\" must not contain nulls", name),
					errdetail("Element %d of the array is null.", i + 1),
					errhint("Leave out elements without a value, in all arrays of the call."));
	}
}

void
idem_arrays_check_length(const char *name, int n, const char *other, int nother)
{
	if (n != nother)
		ereport(ERROR,
				errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("arrays \"%s\" and \"%s\" differ in length", name, other),
				errdetail("Their lengths are %d and %d.", n, nother),
				errhint("Pass the same number of elements in both arrays."));
}

/* The names of queues; at least one */
text **
idem_arrays_queues(FunctionCallInfo fcinfo, int arg, int *n)
{
	Datum *elems;
	bool *nulls;
	text **queues;

	if (!idem_arrays_get(fcinfo, arg, "queues", &elems, &nulls, n))
		ereport(ERROR,
				errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				errmsg("array \"%s\" must not be null", "queues"),
				errdetail("Every job belongs to a queue."),
				errhint("Name the queues that this worker serves."));
	if (*n < 1 || *n > IDEM_MAX_QUEUES)
		ereport(ERROR,
				errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("invalid number of queues"),
				errdetail("The array has %d queues; it must have between 1 and %d.", *n, IDEM_MAX_QUEUES),
				errhint("Name the queues that this worker serves."));
	queues = palloc_array(text *, *n);
	for (int i = 0; i < *n; i++)
	{
		NullableDatum name = {.value = elems[i], .isnull = nulls[i]};

		queues[i] = idem_value_queue(name);
	}
	return queues;
}

static int
compare_keys(const void *a, const void *b, void *arg)
{
	text **keys = arg;
	int ia = *(const int *) a;
	int ib = *(const int *) b;
	int la = keys[ia] ? (int) VARSIZE_ANY_EXHDR(keys[ia]) : 0;
	int lb = keys[ib] ? (int) VARSIZE_ANY_EXHDR(keys[ib]) : 0;
	int cmp =
		la > 0 && lb > 0 ? memcmp(VARDATA_ANY(keys[ia]), VARDATA_ANY(keys[ib]), Min(la, lb)) : 0;

	if (cmp == 0)
		cmp = la - lb;
	return cmp != 0 ? cmp : ia - ib;
}

/*
 * Order in which to process keys: by their bytes; equal keys, and missing ones
 * (NULL), by their position.  Two calls that follow this order cannot deadlock.
 */
int *
idem_arrays_order(text **keys, int n)
{
	int *order = MemoryContextAllocExtended(CurrentMemoryContext, n * sizeof(int), MCXT_ALLOC_HUGE);

	for (int i = 0; i < n; i++)
		order[i] = i;
	qsort_arg(order, n, sizeof(int), compare_keys, keys);
	return order;
}

/* Error context callback: names the position of the element, never its value */
void
idem_arrays_say_element(void *arg)
{
	const IdemElement *element = arg;

	errcontext("element %d of array \"%s\"", element->ord + 1, element->array);
}
