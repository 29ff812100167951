/*
 * idem_cutover.c
 *		A program; see usage().
 */
#include <getopt.h>
#include <stdlib.h>
#include <string.h>

#include "common.h"

int
main(int argc, char **argv)
{
	common_begin("idem_cutover", NULL);
	if (argc > 1 && strcmp(argv[1], "--version") == 0)
	{
		common_print_version();
		return 0;
	}
	if (argc > 1 && strcmp(argv[1], "--help") == 0)
	{
		puts("idem_cutover is not written yet.");
		return 0;
	}
	common_wrong_use("not written yet");
}
